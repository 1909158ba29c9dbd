"""Other people's model code on this package's attention; each module imports its framework itself."""
