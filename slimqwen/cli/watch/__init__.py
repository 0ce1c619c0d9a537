"""`slimqwen watch`: progress of running commands, figures of servers, and their display."""
