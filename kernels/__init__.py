"""A folder for each part of the model, and in it a file for each operation: README.md is the map."""
