"""The project's vocabulary: frozen values and their encoding. Standard library only."""
