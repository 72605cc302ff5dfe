"""Share one GPU between processes: time slices, oversubscribed memory, live control.

The folders beside this file are links to the top-level folders of the repository: installed, they are this package.
"""
