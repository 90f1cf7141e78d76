"""Pages, tables and pictures of the documentation that are made from code: `python -m scripts.draw --help`.

Each module says by `files` what lies where. A test compares all of it with what is there.
"""
