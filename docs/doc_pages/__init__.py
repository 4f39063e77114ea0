"""What the documentation site generates: one module for each kind of page content, plain Markdown text out of each.

docstrings.py  docstrings of this project as Markdown
reference.py   classes and functions of a module with their signatures
records.py     recipes with their sources, state layouts
commands.py    options of every command, from its parser
messages.py    every error message of the core, with its cure
expressions.py what differs in a message, in words
numbers.py     ranges of numbers
figures.py     tables of measured numbers, from the raw results
metrics.py     names and help of exported metrics
"""
