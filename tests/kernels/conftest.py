"""What lies in ``interpreted`` needs Triton to be imported in its own way: ``test_triton.py`` runs it in a process of
its own."""

collect_ignore = ["interpreted"]
