"""One file per verb: parse, call, print, exit. Nothing heavy is imported before it is needed."""
