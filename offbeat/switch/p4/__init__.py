"""A switch in P4: a program for programmable switches sums packets in their pipeline.

* `switch.p4` - the program, for v1model; `switch.p4info.txtpb` - what of it control sees
* `rules` - a job, its members and its policy as entries of the program's tables
* `p4runtime` - rules as requests of P4Runtime; `simple_switch_cli` - as commands of simple_switch_CLI
* `shown_rules` - the commands that would set up the jobs of another switch

Rules alone set a switch up: no register is written from outside, which P4Runtime on BMv2 could not do.
"""
