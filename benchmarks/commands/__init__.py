"""The commands of ``halocline bench``, one file each; they alone know typer and rich."""
