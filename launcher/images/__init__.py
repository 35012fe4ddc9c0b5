"""The image that the nodes run: built, found or pinned by digest."""
