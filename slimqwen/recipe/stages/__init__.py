"""The stages: each module of this package is one stage and defines it as STAGE."""
