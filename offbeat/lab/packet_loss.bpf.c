// SPDX-License-Identifier: Apache-2.0
/* Drops UDP datagrams at random, where they leave a host and where they come in; see packet_loss.py. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define PROTOCOL_AT (ETH_HLEN + 9) /* in IPv4's header */

enum counter { OUT, LOST_OUT, IN, LOST_IN, COUNTERS };

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, 1);
} chance SEC(".maps"); /* of 2^32 */

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, COUNTERS);
} counters SEC(".maps");

static __always_inline void count(__u32 which)
{
	__u64 *counter = bpf_map_lookup_elem(&counters, &which);
	if (counter)
		*counter += 1;
}

static __always_inline int decide(struct __sk_buff *skb, __u32 which)
{
	__u32 key = 0, *limit = bpf_map_lookup_elem(&chance, &key);
	__u8 protocol = 0;

	if (!limit || skb->protocol != bpf_htons(ETH_P_IP) ||
	    bpf_skb_load_bytes(skb, PROTOCOL_AT, &protocol, 1) || protocol != IPPROTO_UDP)
		return TC_ACT_UNSPEC;
	count(which);
	if (bpf_get_prandom_u32() >= *limit)
		return TC_ACT_UNSPEC;
	count(which + 1);
	return TC_ACT_SHOT;
}

SEC("tc")
int drop_out(struct __sk_buff *skb)
{
	return decide(skb, OUT);
}

SEC("tc")
int drop_in(struct __sk_buff *skb)
{
	return decide(skb, IN);
}

char _license[] SEC("license") = "Apache-2.0";
