"""`slimqwen watch`: what it reads of running commands and servers, and its display."""
