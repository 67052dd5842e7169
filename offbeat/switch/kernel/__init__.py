"""A switch in the kernel: an eBPF program at the ports' tc ingress or XDP hooks sums packets where they come in.

* `switch.bpf.c` - the program: what becomes of each packet
* `compiler` - the program for this machine, by clang, once
* `libbpf` - loads it, reads and writes its maps, attaches it; `layout` - the structures that lie in the maps
* `kernel_plane` - jobs, members and policies in those maps: the data plane
* `kernel_switch` - the data plane, its ports, and a socket from which control sends
"""
