"""A variant as a container image: what goes in, how it is built, and what a built one has to hold."""
