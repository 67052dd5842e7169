"""What is summed in the network, and who may go on by it?

Workers send packets of integers to a switch, which adds them up and sends each worker the sum (`chunk_stream`), or
keeps it until it is read (`table`). Everything but sockets is without I/O.

* `packet` - the header of a packet, and one packet; `packet_batch` - many, as arrays; `checksum` - of their bytes
* `fixed_point` - floats as integers with an exponent per chunk, and back
* `strategy` - a policy as the numbers that a switch knows of it
* `job_shape` - what a job takes of a switch; `members` - who takes part in it; `cap` - how much each may add
* `job_state` - the reference model of a job: what becomes of each packet; of that `chunk_stream` are the sums of all
  workers' chunks, `table` those that last, `clocks` who has finished which step, and who may begin the next
* `vector_stream` - `chunk_stream` for whole batches of packets
* `stream_client`, `table_client` - a worker's side of each; `stream_exchange` - one sum of a stream; `resend_timer` -
  when it sends again; `client_thread` - keeps one going while it computes
* `data_plane` - where packets are summed; `software_plane` - in this process, behind `udp_switch` or in
  `memory_switch`; `kernel` - by an eBPF program at the ports of this machine; `p4` - the program and the rules of a
  P4 switch
* `udp_socket` - batches of datagrams, one system call each
* `control_server`, `control_client` - who takes part, by which policy, over authenticated links; `clock_watch` - who
  waits for others, and who may go further by name; `sum_watch` - which sums no longer wait for late workers;
  `rejoin_meeting` - of the workers of a job that a switch has forgotten
* `serve` - a switch as a process
* `switch_doctor` - what works between this machine and a switch: `trial_job` sums by itself, `sending_rate` is how fast
  a worker's own side is, `offloads` what an interface does with packets

Nothing here loads torch. After SwitchML (Sapio et al., "Scaling distributed machine learning with in-network
aggregation", NSDI 2021) for the stream, and Serene (Nunes et al., "No worker left (too far) behind", Int. J. of Network
Management, 2025) for the table, its clocks and the change of policies.
"""
