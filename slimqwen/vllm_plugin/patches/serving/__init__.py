"""What the API server refuses and answers, and what a start compiles, on every device."""
