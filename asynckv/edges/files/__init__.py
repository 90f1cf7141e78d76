"""Blocks in files: records, the folder and its index, and the threads that read and write them."""
