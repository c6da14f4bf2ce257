"""``python -m halocline.cli``, for launchers that start modules."""

from . import main

main()
