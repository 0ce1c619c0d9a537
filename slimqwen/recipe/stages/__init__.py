"""The stages, one a module: a module here that defines STAGE is a stage."""
