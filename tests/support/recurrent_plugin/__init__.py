"""A small, complete plugin as an author would write it: a recurrent target and a drafter with a paged history.

Tests break copies of it, one mistake at a time, and look at what their author is told.
"""
