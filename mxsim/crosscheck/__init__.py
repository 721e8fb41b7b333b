"""Every backend against one corpus, bit for bit: ``mxsim crosscheck``, ``make crosscheck``.

- case.py: what is asked; reports.py, patterns.py, corpus.py: the cases.
- reference.py: the judge, the specification in integers.
- backend.py: what a backend is, and ours; witnesses.py: other people's; backends.py: the list.
- known.py: differences of witnesses that are explained, as data.
- matrix.py: who agrees with the judge; report.py: printed and written; main.py: the command.

docs/backends.md explains how to read the result and how to add a backend.
"""
