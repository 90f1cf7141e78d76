"""Pages, tables and pictures of the documentation that are made from code: `python -m scripts.draw --help`.

The `files` of each module returns its files and their text. A test compares them with the files in the tree.
"""
