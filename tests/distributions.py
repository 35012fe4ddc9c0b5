"""Requirements files."""


def requirements(text: str) -> list[str]:
    """The lines of a requirements file without its comments."""
    return [line for line in text.splitlines() if line and not line.startswith("#")]
