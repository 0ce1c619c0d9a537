"""A variant: a name -> its config.env with inheritance, its recipe, its weights, its baseline."""
