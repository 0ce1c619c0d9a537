"""What needs no server: roofline, output head, vocabulary coverage, each a record kind."""
