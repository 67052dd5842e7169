"""Small faults, one at a time, that the tests of their room have to find: `make mutants`.

`mutants.toml` lists them; `__main__` applies each to a copy of the tree and runs the tests that the list names;
`result.json` says which test found it. Programs that make mutants by themselves (mutmut, cosmic-ray) take no list of
faults, and run the tests in the process that holds the mutant; these tests start processes.
"""
