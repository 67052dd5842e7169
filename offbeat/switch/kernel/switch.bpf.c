// SPDX-License-Identifier: Apache-2.0
/* A switch in the kernel: packets are summed where they come in, at the ports' tc ingress hooks, and go out from there.
 * With HAS_XDP gradients are summed before that, at the ports' XDP hooks, which packets that need no answer do not pass:
 * all but the last of each sum. Whatever is to be answered, or is anything else, goes on to tc, for nothing can be copied
 * at XDP for each of many ports.
 *
 * What becomes of each packet is what offbeat/switch/job_state.py says, bit for bit; tests replay the same packets to
 * both. It differs in how clocks are kept: the least of 64 numbers costs no more here than a ring of bits, and is the
 * same. What is rare is left to control: who takes part, and what an eviction completes.
 *
 * Locks: a job's is held for its clocks and members, a slot's for its sum, a row's for its update; never two at once,
 * and no helper is called meanwhile. A packet that read who contributes before another CPU settled it is dropped or left
 * incomplete, and put right when it is sent again.
 *
 * Numbers in packets are little-endian, and so must this machine be. Defined when it is compiled: MOST_VALUES (int32 in
 * a packet), MOST_SLOTS, MOST_ROWS, MOST_JOBS (of all jobs together), HAS_XDP.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define MAGIC 0x0FFB
#define VERSION 2
#define BLOCK 16 /* int32 that `count` counts */
#define MOST_BLOCKS (MOST_VALUES / BLOCK)
#define MOST_WORKERS 64
#define ALL 255
#define NOBODY 256
#define ZERO_EXPONENT (-127)
#define FRAME_BYTES (ETH_HLEN + sizeof(struct iphdr) + sizeof(struct udphdr))
#define UNKNOWN ((__s64)1 << 40) /* further than any clock */
#define SEED 0x0FFBEA75u /* of checksums */
#define FACTOR 0x9E3779B5u
#define MOST_ATTEMPTS 8
#define COMPLETED 0x0FFBA115 /* what is noted in front of a packet that has completed a sum at XDP */

enum kind { JOIN = 1, JOIN_OK, DATA, RESULT, INC, INC_OK, READ, ROW, CLOCK, GRANT, LEAVE, LEAVE_OK, PROBE, PROBE_OK, NACK };
enum flag { FIRST = 1, PRIME = 2, PARTIAL = 4, SATURATED = 8 };
enum reason {
	UNKNOWN_JOB = 1, NOT_A_MEMBER, STALE_COOKIE, WRONG_PORT, MALFORMED, SUPERSEDED, AHEAD_OF_RING, WRONG_CLOCK, HELD_UP
};
enum counter { FOREIGN, STRANGE, REFUSED, FRAGMENTS, BUNDLES, DAMAGED, COUNTERS, OURS = COUNTERS, OTHERS };
#define FROM_WORKERS (1 << JOIN | 1 << DATA | 1 << INC | 1 << READ | 1 << CLOCK | 1 << LEAVE | 1 << PROBE)

/* See offbeat/switch/packet.py. */
struct header {
	__u16 magic;
	__u8 flags, kind;
	__u16 job;
	__u8 worker, count;
	__u32 cookie, clock, chunk;
	__u16 slot, epoch;
	__u32 bitmap;
	__s8 exponent;
	__u8 unused, window_old, window_new;
	__u32 checksum; /* of all the rest; see offbeat/switch/checksum.py */
};

struct ethernet { /* addresses as numbers of 16 bits: that is how they are aligned */
	__u16 to[3], from[3];
	__be16 type;
};

struct frame {
	__u16 pad; /* so that all behind the Ethernet header is aligned */
	struct ethernet eth;
	struct iphdr ip;
	struct udphdr udp;
	struct header h;
};

struct settings {
	__be32 ip;
	__be16 port;
	__u16 unused;
};

struct job {
	struct bpf_spin_lock lock;
	__u32 index, number, workers, blocks, slots, ring, rows, first_slot, first_row, quorum;
	__s32 exponent;
	__u64 members;
	__u32 low, high, window_old, window_new, effective, epoch;
	__u32 finished[MOST_WORKERS], acked[MOST_WORKERS], until[MOST_WORKERS];
	__u64 refused[16];
	__u32 is_capped;
	__s32 cap_exponent, limits[256]; /* by exponent; see offbeat/switch/cap.py */
};

struct member {
	__u32 cookie, ifindex;
	__be32 ip;
	__be16 port;
	__u16 is_bound;
	__u16 mac[3], own_mac[3];
	__u32 unused;
	__u64 heard_ns, duplicates, packets[16];
	__u64 elements, clamped, squares; /* of what was added, where that is capped */
};

struct slot {
	struct bpf_spin_lock lock;
	__u32 chunk, clock;
	__u16 attempt;
	__u8 flags, is_used, is_complete, has_values;
	__s8 exponent;
	__u8 unused[5];
	__u64 seen;
	__s32 values[MOST_VALUES];
};

struct exchange { /* who contributes to it */
	struct bpf_spin_lock lock;
	__u32 clock, is_settled, unused;
	__u64 who;
};

struct row {
	struct bpf_spin_lock lock;
	__u32 flags;
	__u64 has_added;
	__u32 added[MOST_WORKERS];
	__s32 values[MOST_VALUES];
};

/* What is to be done with a slot. It stands in a map so that the verifier knows nothing of it: then all ways lead through
 * the loop over the values as one, which it follows once. */
struct todo {
	__u32 refusal, to, is_duplicate; /* a reason or 0; a worker, ALL or NOBODY */
	__u64 lacking; /* members that lack the result in the slot */
	__u32 blocks; /* to go through */
	__s32 keeps; /* -1 if there are values, 0 if they are still zeros */
	__s32 takes; /* -1 if scratch counts, 0 to read values only */
	__s32 compares; /* -1 to keep the largest, 0 to add */
};

/* What a CPU has in hand: far more than fits a stack. */
struct scratch {
	struct frame f; /* as it came in; its header as it goes out */
	struct frame out; /* to one of many */
	struct header kept; /* of the slot */
	struct todo todo;
	__u64 clamped, squares; /* of the values */
	__s32 values[MOST_VALUES];
};

#define MAP(NAME, TYPE, KEY, VALUE, ENTRIES) \
	struct { \
		__uint(type, TYPE); \
		__type(key, KEY); \
		__type(value, VALUE); \
		__uint(max_entries, ENTRIES); \
	} NAME SEC(".maps")

MAP(settings, BPF_MAP_TYPE_ARRAY, __u32, struct settings, 1);
MAP(counters, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, COUNTERS);
MAP(numbers, BPF_MAP_TYPE_HASH, __u32, __u32, MOST_JOBS);
MAP(jobs, BPF_MAP_TYPE_ARRAY, __u32, struct job, MOST_JOBS);
MAP(members, BPF_MAP_TYPE_ARRAY, __u32, struct member, MOST_JOBS * MOST_WORKERS);
MAP(slots, BPF_MAP_TYPE_ARRAY, __u32, struct slot, MOST_SLOTS);
MAP(exchanges, BPF_MAP_TYPE_ARRAY, __u32, struct exchange, MOST_SLOTS);
MAP(rows, BPF_MAP_TYPE_ARRAY, __u32, struct row, MOST_ROWS);
MAP(scratches, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct scratch, 1);

static __always_inline void count(__u32 which)
{
	__u64 *counter = bpf_map_lookup_elem(&counters, &which);
	if (counter)
		*counter += 1;
}

static __always_inline struct job *job_of(__u32 number)
{
	__u32 *index = bpf_map_lookup_elem(&numbers, &number);
	return index ? bpf_map_lookup_elem(&jobs, index) : 0;
}

static __always_inline struct member *member_of(struct job *job, __u32 worker)
{
	__u32 key = job->index * MOST_WORKERS + (worker & (MOST_WORKERS - 1));
	return bpf_map_lookup_elem(&members, &key);
}

static __always_inline void copy(__u16 *mac, const __u16 *other)
{
	for (int i = 0; i < 3; i++)
		mac[i] = other[i];
}

/* By hand: what clang 14 makes of its builtins for it ends in a crash of the compiler. */
static __always_inline __u32 bits_in(__u64 x)
{
	x -= x >> 1 & 0x5555555555555555;
	x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333);
	x = x + (x >> 4) & 0x0f0f0f0f0f0f0f0f;
	return x * 0x0101010101010101 >> 56;
}

static __always_inline __u32 first_bit(__u64 x)
{
	return bits_in((x & -x) - 1);
}

/* Numbers of 32 bits wrap around. */
static __always_inline __s32 distance(__u32 number, __u32 other)
{
	return number - other;
}

/* -- what differs between hooks: `packet` is a struct xdp_md at XDP, else a struct __sk_buff ----------------------- */

enum hook { AT_TC, AT_XDP };

static __always_inline long load_bytes(void *packet, enum hook hook, __u32 from, void *to, __u32 size)
{
	return hook == AT_XDP ? bpf_xdp_load_bytes(packet, from, to, size) : bpf_skb_load_bytes(packet, from, to, size);
}

static __always_inline __u32 length_of(void *packet, enum hook hook)
{
	return hook == AT_XDP ? bpf_xdp_get_buff_len(packet) : ((struct __sk_buff *)packet)->len;
}

/* Whether the packet has completed a sum at XDP. */
static __always_inline int has_completed(struct __sk_buff *skb)
{
	__u32 *note = (void *)(long)skb->data_meta;

	return (void *)(note + 1) <= (void *)(long)skb->data && *note == COMPLETED;
}

/* The checksum of a packet, whose header stands in the frame and its values in scratch. A function of its own to the
 * verifier, which follows the loop once. What is multiplied is so by constants, since a block's words do not wait for one
 * another then. */
__noinline __u32 checksum_of(struct scratch *s)
{
	__u32 *words, blocks;
	__u64 sum = SEED; /* of which the lower half counts */

	if (!s)
		return 0;
	words = (__u32 *)&s->f.h;
	blocks = s->f.h.count;
#pragma unroll
	for (__u32 i = 0; i < 8; i++)
		sum = (sum + (words[i] ^ words[i] >> 16)) * FACTOR;
	for (__u32 block = 0; block < MOST_BLOCKS; block++) {
		__u32 power = 1;
		__u64 of_block = 0;

		if (block >= blocks)
			break;
#pragma unroll
		for (__u32 i = 0; i < BLOCK; i++) {
			__u32 word = s->values[block * BLOCK + BLOCK - 1 - i];

			power *= FACTOR;
			of_block += (__u64)(word ^ word >> 16) * power;
		}
		sum = sum * power + of_block;
	}
	return sum;
}

/* -- sending ---------------------------------------------------------------------------------------------------- */

static __always_inline void seal(struct frame *f)
{
	__u32 size = sizeof(f->udp) + sizeof(f->h) + f->h.count * BLOCK * 4, sum = 0;
	__u16 *word = (__u16 *)&f->ip;

	f->udp.len = bpf_htons(size);
	f->udp.check = 0; /* none, which IPv4 permits */
	f->ip.tot_len = bpf_htons(sizeof(f->ip) + size);
	f->ip.id = 0;
	f->ip.frag_off = bpf_htons(0x4000);
	f->ip.ttl = 64;
	f->ip.check = 0;
	for (int i = 0; i < 10; i++)
		sum += word[i];
	sum = (sum & 0xffff) + (sum >> 16);
	f->ip.check = ~((sum & 0xffff) + (sum >> 16));
}

static __always_inline int resize(struct __sk_buff *skb, __u32 blocks)
{
	__u32 size = FRAME_BYTES + sizeof(struct header) + blocks * BLOCK * 4;
	return skb->len == size ? 0 : bpf_skb_change_tail(skb, size, 0);
}

/* Take the values behind the packet's header to scratch, or put them there. */
static __always_inline int load(void *packet, enum hook hook, struct scratch *s)
{
	__u32 size = s->f.h.count * BLOCK * 4;

	asm volatile("" : "+r"(size)); /* so that the check is made of what is passed on */
	if (!size || size > MOST_VALUES * 4)
		return !!size;
	return !!load_bytes(packet, hook, FRAME_BYTES + sizeof(struct header), s->values, size);
}

static __always_inline int fill(struct __sk_buff *skb, struct scratch *s)
{
	__u32 size = s->f.h.count * BLOCK * 4;

	if (resize(skb, s->f.h.count))
		return -1;
	asm volatile("" : "+r"(size));
	if (!size || size > MOST_VALUES * 4)
		return !!size;
	return !!bpf_skb_store_bytes(skb, FRAME_BYTES + sizeof(struct header), s->values, size, 0);
}

/* Send the packet back to where it came from, with the header that stands in its frame. */
static __always_inline int reply(struct __sk_buff *skb, struct scratch *s)
{
	struct frame *f = &s->f;
	__be32 ip = f->ip.saddr;
	__be16 port = f->udp.source;

	for (int i = 0; i < 3; i++) {
		__u16 to = f->eth.to[i];

		f->eth.to[i] = f->eth.from[i];
		f->eth.from[i] = to;
	}
	f->ip.saddr = f->ip.daddr;
	f->ip.daddr = ip;
	f->udp.source = f->udp.dest;
	f->udp.dest = port;
	f->h.checksum = checksum_of(s);
	seal(f);
	if (resize(skb, f->h.count) || bpf_skb_store_bytes(skb, 0, &f->eth, FRAME_BYTES + sizeof(f->h), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(skb->ifindex, 0);
}

/* Send the packet, whose values are in their place, to all members, with the header that stands in its frame. */
static __noinline int broadcast(struct __sk_buff *skb, struct scratch *s, struct job *job)
{
	struct frame *out = &s->out;
	__u64 to;

	if (!job || !s)
		return -1;
	s->f.h.checksum = checksum_of(s);
	*out = s->f;
	to = *(volatile __u64 *)&job->members;
	out->ip.saddr = s->f.ip.daddr;
	out->udp.source = s->f.udp.dest;
	for (__u32 worker = 0; worker < MOST_WORKERS; worker++) {
		struct member *member;

		if (!(to >> worker & 1))
			continue;
		member = member_of(job, worker);
		if (!member || !member->is_bound)
			continue;
		copy(out->eth.to, member->mac);
		copy(out->eth.from, member->own_mac);
		out->ip.daddr = member->ip;
		out->udp.dest = member->port;
		seal(out);
		if (bpf_skb_store_bytes(skb, 0, &out->eth, FRAME_BYTES + sizeof(out->h), 0))
			return -1;
		bpf_clone_redirect(skb, member->ifindex, 0);
	}
	return 0;
}

static __always_inline void answer(struct header *h, __u8 kind, __u8 worker)
{
	h->flags = VERSION << 4;
	h->kind = kind;
	h->worker = worker;
	h->count = 0;
	h->cookie = h->bitmap = 0;
	h->exponent = h->unused = 0;
	h->window_old = h->window_new = 0;
}

/* Refuse a packet; attempt and exponent are of what its slot serves instead. */
static __always_inline int refuse_in_favour(
	struct __sk_buff *skb, struct scratch *s, struct job *job, __u8 reason, __u8 about, __u16 attempt, __s8 exponent)
{
	struct header *h = &s->f.h;
	__u8 kind = h->kind;

	if (job)
		__sync_fetch_and_add(&job->refused[reason & 15], 1);
	answer(h, NACK, about);
	h->epoch = attempt;
	h->exponent = exponent;
	h->window_old = kind;
	h->window_new = reason;
	return reply(skb, s);
}

static __always_inline int refuse(struct __sk_buff *skb, struct scratch *s, struct job *job, __u8 reason, __u8 about)
{
	return refuse_in_favour(skb, s, job, reason, about, 0, 0);
}

/* -- clocks ----------------------------------------------------------------------------------------------------- */

struct grant {
	__u32 low, epoch, effective, window_old, window_new, until;
	__u32 has_moved; /* whether all are to be told */
};

/* Advance `low` to the last step that all members have finished. The job is locked; so is it in the next three. */
static __always_inline int advance(struct job *job)
{
	__s64 least = UNKNOWN;

	for (int w = 0; w < MOST_WORKERS; w++) { /* without a branch, which the verifier would follow 2^64 times */
		__s64 is_member = -(__s64)(job->members >> w & 1);
		__s64 lead = ((__s64)distance(job->finished[w], job->low) & is_member) | (UNKNOWN & ~is_member);
		__s64 less = lead - least;
		least += less & (less >> 63);
	}
	if (least <= 0 || least >= UNKNOWN)
		return 0;
	job->low += (__u32)least;
	return 1;
}

/* Steps from `low` to the first one that nobody can have been granted yet, by the window or by name. */
static __always_inline __u32 farthest(struct job *job)
{
	__s64 most = (__s64)job->window_new + 1;

	for (int w = 0; w < MOST_WORKERS; w++) {
		__s64 more = ((__s64)distance(job->until[w], job->low) & -(__s64)(job->members >> w & 1)) - most;
		most += more & ~(more >> 63);
	}
	return most;
}

static __always_inline int finish(struct job *job, __u32 worker, __u32 clock)
{
	if (distance(clock, job->finished[worker]) > 0)
		job->finished[worker] = clock;
	if (distance(clock, job->high) > 0)
		job->high = clock;
	return advance(job);
}

static __always_inline void look(struct job *job, __u32 worker, struct grant *grant)
{
	grant->low = job->low;
	grant->epoch = job->epoch;
	grant->effective = job->effective;
	grant->window_old = job->window_old;
	grant->window_new = job->window_new;
	grant->until = job->until[worker];
}

static __always_inline void grant_in(struct header *h, struct grant *grant, __u8 kind, __u8 worker)
{
	answer(h, kind, worker);
	h->cookie = worker == ALL ? 0 : grant->until;
	h->clock = grant->low;
	h->chunk = 0;
	h->slot = 0;
	h->epoch = grant->epoch;
	h->bitmap = grant->effective;
	h->window_old = grant->window_old;
	h->window_new = grant->window_new;
}

static __always_inline int tell_all(struct __sk_buff *skb, struct scratch *s, struct job *job, struct grant *grant)
{
	int error;

	s->kept = s->f.h;
	grant_in(&s->f.h, grant, GRANT, ALL);
	error = resize(skb, 0) || broadcast(skb, s, job);
	s->f.h = s->kept;
	return error;
}

static __always_inline int on_clock(struct __sk_buff *skb, struct scratch *s, struct job *job, __u32 worker)
{
	__u32 clock = s->f.h.clock;
	struct grant grant = {};
	int may_go_on, lead;

	bpf_spin_lock(&job->lock);
	lead = distance(clock, job->low);
	if (lead > (__s32)job->ring - 2) {
		bpf_spin_unlock(&job->lock);
		return refuse(skb, s, job, AHEAD_OF_RING, worker);
	}
	if (lead > 0)
		grant.has_moved = finish(job, worker, clock);
	may_go_on = lead <= (__s32)(distance(job->effective, clock) > 0 ? job->window_old : job->window_new) ||
		    distance(job->until[worker], clock) > 0;
	look(job, worker, &grant);
	bpf_spin_unlock(&job->lock);
	if (grant.has_moved) {
		tell_all(skb, s, job, &grant);
		return TC_ACT_SHOT;
	}
	if (!may_go_on)
		return TC_ACT_SHOT;
	grant_in(&s->f.h, &grant, GRANT, worker);
	return reply(skb, s);
}

static __always_inline int on_look(struct __sk_buff *skb, struct scratch *s, struct job *job, __u32 worker, __u8 kind)
{
	struct grant grant = {};

	bpf_spin_lock(&job->lock);
	look(job, worker, &grant);
	bpf_spin_unlock(&job->lock);
	grant_in(&s->f.h, &grant, kind, worker);
	return reply(skb, s);
}

/* -- sums ------------------------------------------------------------------------------------------------------- */

/* values += scratch, within 32 bits, or the larger of both; and scratch = values, as its `todo` says. Whether a sum did
 * not fit. */
static __always_inline __u32 add_to(__s32 *values, struct scratch *scratch)
{
	volatile struct todo *todo = &scratch->todo;
	__u32 overflows = 0, blocks = todo->blocks;
	__s32 keeps = todo->keeps, takes = todo->takes, compares = todo->compares & keeps & takes; /* if there are two */

	for (__u32 block = 0; block < MOST_BLOCKS; block++) {
		if (block >= blocks)
			break;
#pragma unroll
		for (__u32 i = 0; i < BLOCK; i++) {
			__u32 at = block * BLOCK + i;
			__u32 a = values[at] & keeps, b = scratch->values[at] & takes, total = a + b;
			__u32 over = (a ^ total) & (b ^ total), larger;
			__s64 less;
			__u32 clamped = ((__u32)((__s32)b >> 31)) ^ 0x7fffffff, is_over = (__u32)((__s32)over >> 31);

			asm("" : "+r"(is_over)); /* no branch, as above */
			overflows |= over & ~compares;
			total = (total & ~is_over) | (clamped & is_over);
			less = (__s64)(__s32)a - (__s32)b;
			larger = a - (__u32)(less & (less >> 63));
			total = (total & ~compares) | (larger & compares);
			values[at] = total;
			scratch->values[at] = total;
		}
	}
	return overflows >> 31;
}

struct clamping {
	__s64 limit;
	__u64 clamped, squares;
};

/* Clamp a block of the values in scratch; count those that were larger, and add up the squares of the upper halves. Called
 * for each block, so that the verifier looks at one. */
static long clamp_block(__u32 block, struct clamping *c)
{
	__u32 zero = 0;
	struct scratch *s = bpf_map_lookup_elem(&scratches, &zero);

	if (!s || block >= MOST_BLOCKS)
		return 1;
	for (__u32 i = 0; i < BLOCK; i++) {
		__s64 value = s->values[block * BLOCK + i], above = c->limit - value, below = c->limit + value, half;

		asm("" : "+r"(above), "+r"(below)); /* no branch, as above */
		above >>= 63;
		below >>= 63;
		value = (value & ~(above | below)) | (c->limit & above) | (-c->limit & below);
		c->clamped -= above | below;
		half = (value ^ value >> 63) >> 16;
		c->squares += half * half;
		s->values[block * BLOCK + i] = value;
	}
	return 0;
}

/* Clamp what a worker brings, and its exponent; see offbeat/switch/cap.py. Of its own, so that its branches are not ways
 * to the loop over the values. */
__noinline int cap(struct scratch *s, __u32 index)
{
	struct job *job = bpf_map_lookup_elem(&jobs, &index);
	struct clamping clamping = {};
	__s32 attempts, shift;
	struct header *h;

	if (!s || !job)
		return 0;
	h = &s->f.h;
	attempts = h->epoch < MOST_ATTEMPTS ? h->epoch : MOST_ATTEMPTS;
	if (h->exponent > job->cap_exponent + attempts)
		h->exponent = job->cap_exponent + attempts;
	clamping.limit = h->flags & PRIME ? job->cap_exponent - ZERO_EXPONENT : job->limits[(__u8)h->exponent];
	bpf_loop(h->count, clamp_block, &clamping, 0);
	shift = 2 * (job->cap_exponent - h->exponent);
	s->clamped = clamping.clamped;
	if (shift < 0)
		s->squares = clamping.squares << (-shift & 63);
	else
		s->squares = shift < 64 ? clamping.squares >> (shift & 63) : 0;
	return 0;
}

static __always_inline void plan(struct scratch *scratch, __u32 blocks, __s32 keeps, __s32 takes)
{
	volatile struct todo *todo = &scratch->todo;

	todo->refusal = todo->is_duplicate = 0;
	todo->to = NOBODY;
	todo->blocks = blocks;
	todo->keeps = keeps;
	todo->takes = takes;
	todo->compares = 0;
}

/* Whether all are in a slot's sum that are to be. */
static __always_inline int is_over(struct slot *slot, __u64 here, __u32 quorum, __u64 who, int is_settled)
{
	__u32 members = bits_in(here);

	if (slot->flags & FIRST)
		return bits_in(slot->seen & here) >= (quorum && quorum < members ? quorum : members);
	return is_settled && (slot->seen & who & here) == (who & here);
}

static __always_inline void complete(struct slot *slot, __u32 workers)
{
	slot->is_complete = 1;
	if (bits_in(slot->seen) < workers)
		slot->flags |= PARTIAL;
}

/* Take a packet into its slot, which is locked, but for its values; says what remains to be done. */
static __always_inline void decide(
	struct job *job, struct slot *slot, struct header *in, __u64 bit, __u64 here, __u64 who, int is_settled,
	volatile struct todo *todo)
{
	int is_in = in->flags & PRIME || who & bit, none_left = is_settled && !(who & here);
	int lead = slot->is_used ? distance(in->chunk, slot->chunk) : 1;

	if (lead < 0 || (lead == 0 && in->epoch < slot->attempt)) {
		todo->refusal = SUPERSEDED;
		return;
	}
	if (lead > 0 || in->epoch > slot->attempt) {
		if (!is_in && !none_left)
			return;
		if (slot->is_used && lead > 0) {
			__u64 who_lacks = 0;

			for (int w = 0; w < MOST_WORKERS; w++) { /* without a branch, as above */
				__u32 ahead = job->acked[w] - slot->chunk;
				who_lacks |= (__u64)(((ahead - 1) | ahead) >> 31) << w;
			}
			todo->lacking = who_lacks & here;
			if (who_lacks & here) {
				todo->refusal = HELD_UP;
				return;
			}
		}
		slot->is_used = 1;
		slot->chunk = in->chunk;
		slot->clock = in->clock;
		slot->attempt = in->epoch;
		slot->flags = in->flags & (FIRST | PRIME);
		slot->is_complete = slot->has_values = 0;
		slot->exponent = ZERO_EXPONENT;
		slot->seen = 0;
	}
	todo->keeps = -(__s32)slot->has_values;
	todo->compares = -(__s32)(slot->flags >> 1 & 1); /* PRIME */
	if (slot->is_complete) {
		todo->to = in->worker;
	} else {
		if (!(slot->seen & bit) && is_in) {
			if (job->is_capped && in->count && slot->has_values &&
			    (in->exponent != slot->exponent || (in->flags ^ slot->flags) & PRIME))
				slot->flags |= SATURATED;
			if (in->exponent > slot->exponent)
				slot->exponent = in->exponent;
			slot->flags |= in->flags & SATURATED;
			slot->seen |= bit;
			if (in->count) {
				slot->has_values = 1;
				todo->takes = -1;
				todo->blocks = in->count;
			}
		} else {
			todo->is_duplicate = 1;
		}
		if (is_over(slot, here, job->quorum, who, is_settled)) {
			complete(slot, job->workers);
			todo->to = ALL;
		}
	}
	if (todo->to != NOBODY && slot->has_values)
		todo->blocks = job->blocks;
}

/* Take a packet into its slot, and note what is to be answered in `todo`, of what is kept in `kept`; a reason to refuse
 * it as it is, -1 if it cannot be, or 0. */
static __always_inline int sum_up(
	struct scratch *s, struct job *job, __u32 worker, struct member *member, __u64 *seen)
{
	struct header *h = &s->f.h, *kept = &s->kept;
	__u32 place = h->chunk & (job->slots - 1), key = job->first_slot + place;
	__u32 exchange_key = job->first_slot + (h->clock & (job->slots - 1));
	struct exchange *exchange = bpf_map_lookup_elem(&exchanges, &exchange_key);
	struct slot *slot = bpf_map_lookup_elem(&slots, &key);
	volatile struct todo *todo = &s->todo;
	__u64 here, who;
	int is_settled;

	if (!slot || !exchange)
		return -1;
	if (h->slot != place || (h->count && h->count != job->blocks))
		return MALFORMED;
	if (distance(h->bitmap, job->acked[worker]) > 0)
		job->acked[worker] = h->bitmap;
	plan(s, 0, 0, 0);
	if (job->is_capped)
		cap(s, job->index);

	bpf_spin_lock(&exchange->lock);
	is_settled = exchange->is_settled && exchange->clock == h->clock;
	who = exchange->who;
	bpf_spin_unlock(&exchange->lock);
	who &= -(__u64)is_settled;
	here = *(volatile __u64 *)&job->members;

	bpf_spin_lock(&slot->lock);
	decide(job, slot, h, 1ULL << worker, here, who, is_settled, todo);
	slot->flags |= add_to(slot->values, s) * SATURATED;
	*seen = slot->seen;
	kept->epoch = slot->attempt;
	kept->chunk = slot->chunk;
	kept->clock = slot->clock;
	kept->exponent = slot->exponent;
	kept->flags = VERSION << 4 | slot->flags;
	bpf_spin_unlock(&slot->lock);

	if (todo->is_duplicate)
		__sync_fetch_and_add(&member->duplicates, 1);
	if (job->is_capped && todo->takes && !(h->flags & PRIME)) {
		__sync_fetch_and_add(&member->elements, h->count * BLOCK);
		__sync_fetch_and_add(&member->clamped, s->clamped);
		__sync_fetch_and_add(&member->squares, s->squares);
	}
	if (todo->to == ALL && kept->flags & FIRST) {
		bpf_spin_lock(&exchange->lock);
		exchange->is_settled = 1;
		exchange->clock = kept->clock;
		exchange->who = *seen & here;
		bpf_spin_unlock(&exchange->lock);
	}
	return 0;
}

static __always_inline int on_data(
	struct __sk_buff *skb, struct scratch *s, struct job *job, __u32 worker, struct member *member)
{
	struct header *h = &s->f.h, *kept = &s->kept;
	volatile struct todo *todo = &s->todo;
	int is_completed = has_completed(skb), reason;
	__u64 seen;

	reason = sum_up(s, job, worker, member, &seen);
	if (reason > 0)
		return refuse(skb, s, job, reason, worker);
	if (reason < 0)
		return TC_ACT_SHOT;
	if (todo->refusal == HELD_UP)
		return refuse(skb, s, job, HELD_UP, first_bit(todo->lacking));
	if (todo->refusal) {
		h->chunk = kept->chunk;
		return refuse_in_favour(skb, s, job, SUPERSEDED, worker, kept->epoch, kept->exponent);
	}
	if (todo->to == NOBODY)
		return TC_ACT_SHOT;
	if (is_completed) /* there it was for all, here it comes for a sum that is there */
		todo->to = ALL;
	h->kind = RESULT;
	h->worker = todo->to;
	h->count = todo->blocks;
	h->cookie = seen >> 32;
	h->clock = kept->clock;
	h->chunk = kept->chunk;
	h->epoch = kept->epoch;
	h->bitmap = (__u32)seen;
	h->exponent = kept->exponent;
	h->flags = kept->flags;
	h->window_old = h->window_new = 0;
	if (fill(skb, s))
		return TC_ACT_SHOT;
	if (todo->to != ALL)
		return reply(skb, s);
	broadcast(skb, s, job);
	return TC_ACT_SHOT;
}

/* -- the table -------------------------------------------------------------------------------------------------- */

static __always_inline int on_inc(
	struct __sk_buff *skb, struct scratch *s, struct job *job, __u32 worker, struct member *member)
{
	struct header *h = &s->f.h;
	__u32 key = job->first_row + h->chunk, flags;
	struct grant grant = {};
	__u64 bit = 1ULL << worker;
	int step, is_duplicate;
	struct row *row;

	step = distance(h->clock, *(volatile __u32 *)&job->finished[worker]);
	if (step > (__s32)job->ring - 1)
		return refuse(skb, s, job, WRONG_CLOCK, worker);
	if (h->chunk >= job->rows || h->count != job->blocks || h->exponent != job->exponent)
		return refuse(skb, s, job, MALFORMED, worker);
	row = bpf_map_lookup_elem(&rows, &key);
	if (!row)
		return TC_ACT_SHOT;
	if (step > 1) { /* all its updates of the step before are in, or it would not have begun this one */
		bpf_spin_lock(&job->lock);
		grant.has_moved = finish(job, worker, h->clock - 1);
		look(job, worker, &grant);
		bpf_spin_unlock(&job->lock);
	}
	bpf_spin_lock(&row->lock);
	/* Another CPU may have added the worker's next update since `step` was read: what is not newer than that is in. */
	is_duplicate = step <= 0 || (row->has_added & bit && distance(h->clock, row->added[worker]) <= 0);
	if (is_duplicate) {
		plan(s, 0, 0, 0);
	} else {
		row->has_added |= bit;
		row->added[worker] = h->clock;
		plan(s, h->count, -1, -1);
	}
	row->flags |= add_to(row->values, s) * SATURATED;
	flags = row->flags;
	bpf_spin_unlock(&row->lock);
	if (is_duplicate)
		__sync_fetch_and_add(&member->duplicates, 1);
	if (grant.has_moved && tell_all(skb, s, job, &grant))
		return TC_ACT_SHOT;
	answer(h, INC_OK, worker);
	h->flags |= flags;
	h->slot = h->epoch = 0;
	return reply(skb, s);
}

static __always_inline int on_read(struct __sk_buff *skb, struct scratch *s, struct job *job, __u32 worker)
{
	struct header *h = &s->f.h;
	__u32 key = job->first_row + h->chunk, flags;
	struct grant grant = {};
	struct row *row;
	int ahead;

	if (h->chunk >= job->rows)
		return refuse(skb, s, job, MALFORMED, worker);
	row = bpf_map_lookup_elem(&rows, &key);
	if (!row)
		return TC_ACT_SHOT;
	bpf_spin_lock(&job->lock);
	ahead = distance(h->clock, job->low);
	if (ahead > (__s32)job->ring - 2) {
		bpf_spin_unlock(&job->lock);
		return refuse(skb, s, job, AHEAD_OF_RING, worker);
	}
	if (ahead > 0)
		grant.has_moved = finish(job, worker, h->clock);
	look(job, worker, &grant);
	bpf_spin_unlock(&job->lock);
	if (grant.has_moved && tell_all(skb, s, job, &grant))
		return TC_ACT_SHOT;
	plan(s, job->blocks, -1, 0);
	bpf_spin_lock(&row->lock);
	add_to(row->values, s);
	flags = row->flags;
	bpf_spin_unlock(&row->lock);
	s->kept = *h;
	answer(h, ROW, worker);
	h->flags |= flags;
	h->count = job->blocks;
	h->clock = grant.low;
	h->slot = 0;
	h->epoch = grant.epoch;
	h->bitmap = s->kept.clock;
	h->exponent = job->exponent;
	if (fill(skb, s))
		return TC_ACT_SHOT;
	return reply(skb, s);
}

/* -- packets ---------------------------------------------------------------------------------------------------- */

static __always_inline int is_ours(struct frame *f, __u32 size)
{
	return f->h.magic == MAGIC && f->h.flags >> 4 == VERSION && f->h.kind <= NACK && 1 << f->h.kind & FROM_WORKERS &&
	       f->h.count <= MOST_BLOCKS && size == sizeof(struct header) + f->h.count * BLOCK * 4;
}

static __always_inline __u8 why_not(struct frame *f, __u32 port, struct job *job, struct member *member)
{
	if (f->h.worker >= MOST_WORKERS || !(*(volatile __u64 *)&job->members >> f->h.worker & 1))
		return NOT_A_MEMBER;
	if (f->h.cookie != member->cookie)
		return STALE_COOKIE;
	if (!member->is_bound)
		return f->h.kind == JOIN ? 0 : WRONG_PORT;
	return member->ip == f->ip.saddr && member->port == f->udp.source && member->ifindex == port ? 0 : WRONG_PORT;
}

static __always_inline void bind(struct frame *f, __u32 port, struct member *member)
{
	member->ip = f->ip.saddr;
	member->port = f->udp.source;
	member->ifindex = port;
	copy(member->mac, f->eth.from);
	copy(member->own_mac, f->eth.to);
	member->is_bound = 1;
}

static __always_inline void note(struct member *member, __u8 kind)
{
	member->heard_ns = bpf_ktime_get_ns();
	__sync_fetch_and_add(&member->packets[kind & 15], 1);
}

/* Look at what came in; its frame and its values are in scratch if it is for the switch (OURS). Else it is to be dropped,
 * and counted as what is returned, or goes its way (OTHERS). */
static __always_inline __u32 look_at(void *packet, enum hook hook, struct scratch *s)
{
	struct frame *f = &s->f;
	__u32 zero = 0, size, ip_size;
	struct settings *setting = bpf_map_lookup_elem(&settings, &zero);

	if (!setting || load_bytes(packet, hook, 0, &f->eth, FRAME_BYTES) || f->eth.type != bpf_htons(ETH_P_IP))
		return OTHERS;
	if (f->ip.version != 4 || f->ip.ihl != 5 || f->ip.protocol != IPPROTO_UDP || f->ip.daddr != setting->ip)
		return OTHERS;
	if (f->ip.frag_off & bpf_htons(0x1fff) || f->udp.dest != setting->port) /* a later fragment says no port */
		return OTHERS;
	if (f->ip.frag_off & bpf_htons(0x2000)) /* the first of a packet that is longer than the path's frames */
		return FRAGMENTS;
	if (hook == AT_TC && ((struct __sk_buff *)packet)->gso_segs > 1) /* several that a host has put into one */
		return BUNDLES;
	size = bpf_ntohs(f->udp.len) - sizeof(f->udp);
	ip_size = bpf_ntohs(f->ip.tot_len) - sizeof(f->ip) - sizeof(f->udp);
	if (size < sizeof(f->h) || size > 65535 || size != ip_size || length_of(packet, hook) < FRAME_BYTES + size ||
	    load_bytes(packet, hook, FRAME_BYTES, &f->h, sizeof(f->h)) || !is_ours(f, size) || load(packet, hook, s))
		return FOREIGN;
	return f->h.checksum == checksum_of(s) ? OURS : DAMAGED;
}

SEC("tc")
int take_packet(struct __sk_buff *skb)
{
	__u32 zero = 0, worker, what;
	struct scratch *s = bpf_map_lookup_elem(&scratches, &zero);
	struct frame *f;
	struct member *member;
	struct job *job;
	__u8 reason;

	if (!s || skb->vlan_present) /* of another network: the port of that one is an interface of its own */
		return TC_ACT_OK;
	f = &s->f;
	what = look_at(skb, AT_TC, s);
	if (what == OTHERS)
		return TC_ACT_OK;
	if (what != OURS) {
		count(what);
		return TC_ACT_SHOT;
	}
	job = job_of(f->h.job);
	if (!job) {
		count(STRANGE);
		return refuse(skb, s, 0, UNKNOWN_JOB, f->h.worker);
	}
	member = member_of(job, f->h.worker);
	if (!member)
		return TC_ACT_SHOT;
	reason = why_not(f, skb->ifindex, job, member);
	if (reason) {
		count(REFUSED);
		return refuse(skb, s, job, reason, f->h.worker);
	}
	if (!member->is_bound)
		bind(f, skb->ifindex, member);
	note(member, f->h.kind);
	worker = f->h.worker & (MOST_WORKERS - 1);
	switch (f->h.kind) {
	case DATA:
		return on_data(skb, s, job, worker, member);
	case INC:
		return on_inc(skb, s, job, worker, member);
	case READ:
		return on_read(skb, s, job, worker);
	case CLOCK:
		return on_clock(skb, s, job, worker);
	case LEAVE:
		return TC_ACT_OK; /* to control's socket: an eviction looks at all slots */
	default:
		return on_look(skb, s, job, worker, f->h.kind == JOIN ? JOIN_OK : PROBE_OK);
	}
}

/* Not of "xdp.frags": at generic hooks Linux 6.18 loses packets that such a program passes. Drivers take frames of a page
 * then, and longer ones are summed at the generic hook. */
#if HAS_XDP
/* Sum a gradient's packet, and drop it if nobody is to be answered. All others go on to tc as they came, where they are
 * taken as if they came again: what has been added is not added twice. */
SEC("xdp")
int take_frame(struct xdp_md *xdp)
{
	__u32 zero = 0, *noted;
	struct scratch *s = bpf_map_lookup_elem(&scratches, &zero);
	struct frame *f;
	struct member *member;
	struct job *job;
	__u64 seen;

	if (!s)
		return XDP_PASS;
	f = &s->f;
	if (look_at(xdp, AT_XDP, s) != OURS || f->h.kind != DATA)
		return XDP_PASS;
	job = job_of(f->h.job);
	if (!job)
		return XDP_PASS;
	member = member_of(job, f->h.worker);
	if (!member || why_not(f, xdp->ingress_ifindex, job, member))
		return XDP_PASS;
	if (bpf_xdp_adjust_meta(xdp, -(int)sizeof(*noted))) /* a driver that takes no notes: all is summed at tc */
		return XDP_PASS;
	noted = (void *)(long)xdp->data_meta;
	if ((void *)(noted + 1) > (void *)(long)xdp->data)
		return XDP_PASS;
	*noted = 0;
	if (sum_up(s, job, f->h.worker & (MOST_WORKERS - 1), member, &seen) || s->todo.refusal)
		return XDP_PASS;
	if (s->todo.to == NOBODY) {
		note(member, DATA);
		return XDP_DROP;
	}
	if (s->todo.to == ALL)
		*noted = COMPLETED;
	return XDP_PASS;
}
#endif

/* -- control: called with a command by test-run, so that it holds the same locks as packets ------------------------- */

enum operation { ADMIT = 1, EVICT, SET_STRATEGY, COMPLETE, ALLOW, FIND };

struct command {
	__u32 operation, job, worker, number; /* chunk (ADMIT), slot (COMPLETE), until (ALLOW), first slot (FIND) */
	__u32 window, slack, quorum, is_done; /* flags instead of a window, one more than the slot found (FIND) */
};

struct eviction {
	__u32 first;
	__u32 unused;
	__u64 bit;
};

static long forget(__u32 index, struct eviction *eviction)
{
	__u32 key = eviction->first + index;
	struct exchange *exchange = bpf_map_lookup_elem(&exchanges, &key);

	if (!exchange)
		return 1;
	bpf_spin_lock(&exchange->lock);
	exchange->who &= ~eviction->bit;
	bpf_spin_unlock(&exchange->lock);
	return 0;
}

/* Take nothing of a worker's next incarnation for a repetition of what the last one added. */
static long forget_row(__u32 index, struct eviction *eviction)
{
	__u32 key = eviction->first + index;
	struct row *row = bpf_map_lookup_elem(&rows, &key);

	if (!row)
		return 1;
	bpf_spin_lock(&row->lock);
	row->has_added &= ~eviction->bit;
	bpf_spin_unlock(&row->lock);
	return 0;
}

struct search {
	__u32 first, from, flags, found;
};

static long find_waiting(__u32 index, struct search *search)
{
	__u32 key = search->first + search->from + index;
	struct slot *slot = bpf_map_lookup_elem(&slots, &key);

	if (!slot)
		return 1;
	if (!slot->is_used || slot->is_complete || (slot->flags & search->flags) != search->flags)
		return 0;
	search->found = search->from + index + 1;
	return 1;
}

/* Complete a slot if all are in it that are to be; `quorum` is another number that settles its exchange, or 0. */
static __always_inline __u32 complete_slot(struct job *job, __u32 index, __u32 quorum)
{
	__u32 key = job->first_slot + (index & (job->slots - 1)), exchange_key, clock, is_first = 0, done = 0;
	struct slot *slot = bpf_map_lookup_elem(&slots, &key);
	__u64 here = *(volatile __u64 *)&job->members, who = 0, seen = 0;
	struct exchange *exchange;
	int is_settled;

	if (!slot)
		return 0;
	clock = slot->clock;
	exchange_key = job->first_slot + (clock & (job->slots - 1));
	exchange = bpf_map_lookup_elem(&exchanges, &exchange_key);
	if (!exchange)
		return 0;
	bpf_spin_lock(&exchange->lock);
	is_settled = exchange->is_settled && exchange->clock == clock;
	if (is_settled)
		who = exchange->who;
	bpf_spin_unlock(&exchange->lock);
	bpf_spin_lock(&slot->lock);
	if (slot->is_used && !slot->is_complete && slot->clock == clock &&
	    is_over(slot, here, quorum ? quorum : job->quorum, who, is_settled)) {
		complete(slot, job->workers);
		done = 1;
		is_first = slot->flags & FIRST;
		seen = slot->seen;
	}
	bpf_spin_unlock(&slot->lock);
	if (is_first) {
		bpf_spin_lock(&exchange->lock);
		exchange->is_settled = 1;
		exchange->clock = clock;
		exchange->who = seen & here;
		bpf_spin_unlock(&exchange->lock);
	}
	return done;
}

SEC("tc")
int take_command(struct __sk_buff *skb)
{
	struct command c;
	struct job *job;
	__u32 worker;
	__u64 bit;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &c, sizeof(c)))
		return TC_ACT_SHOT;
	job = bpf_map_lookup_elem(&jobs, &c.job);
	if (!job)
		return TC_ACT_SHOT;
	worker = c.worker & (MOST_WORKERS - 1);
	bit = 1ULL << worker;
	c.is_done = 1;
	if (c.operation == ADMIT) {
		struct eviction eviction = {.first = job->first_row, .bit = bit};

		bpf_loop(job->rows, forget_row, &eviction, 0);
		bpf_spin_lock(&job->lock);
		job->finished[worker] = job->until[worker] = job->low;
		job->acked[worker] = c.number;
		job->members |= bit;
		bpf_spin_unlock(&job->lock);
	} else if (c.operation == EVICT) {
		struct eviction eviction = {.first = job->first_slot, .bit = bit};

		bpf_spin_lock(&job->lock);
		job->members &= ~bit;
		c.is_done = advance(job);
		bpf_spin_unlock(&job->lock);
		bpf_loop(job->slots, forget, &eviction, 0);
	} else if (c.operation == SET_STRATEGY) {
		bpf_spin_lock(&job->lock);
		if (distance(job->effective - 1, job->low) > 0) {
			c.is_done = 0; /* the change before is not in effect for all */
		} else {
			job->effective = job->low + farthest(job);
			job->window_old = job->window_new;
			job->window_new = c.window;
			job->epoch = (job->epoch + 1) & 0xffff;
			job->quorum = c.quorum;
		}
		bpf_spin_unlock(&job->lock);
	} else if (c.operation == ALLOW) {
		bpf_spin_lock(&job->lock);
		if (!(job->members & bit) || distance(job->effective - 1, job->low) > 0) {
			c.is_done = 0;
		} else {
			__u32 most = job->low + c.slack + 1;

			if (distance(c.number, most) > 0)
				c.number = most;
			/* What was allowed before is not taken back: the worker knows of it. */
			if (distance(c.number, job->until[worker]) > 0)
				job->until[worker] = c.number;
		}
		bpf_spin_unlock(&job->lock);
	} else if (c.operation == FIND) {
		struct search search = {.first = job->first_slot, .from = c.number, .flags = c.window};

		if (c.number < job->slots)
			bpf_loop(job->slots - c.number, find_waiting, &search, 0);
		c.is_done = search.found;
	} else {
		c.is_done = complete_slot(job, c.number, c.quorum);
	}
	bpf_skb_store_bytes(skb, ETH_HLEN, &c, sizeof(c), 0);
	return TC_ACT_OK;
}

char LICENSE[] SEC("license") = "Apache-2.0";
