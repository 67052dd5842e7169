// SPDX-License-Identifier: Apache-2.0
/* A switch as a P4-16 program for v1model: packets are summed in the pipeline, and go out from there.
 *
 * What becomes of each packet is what offbeat/switch/job_state.py says, where a pipeline can do it:
 *
 *   the pipeline does                                     control does, by entries of tables alone
 *   ----------------------------------------------------  ------------------------------------------------------------
 *   answer JOIN and PROBE; learn the UDP port that a       say who may join: cookie, port, MAC and IP (`member`,
 *   worker joins from                                      `receiver`, a multicast group per job)
 *   sum DATA, once per worker; who contributes, attempts,  begin a job and give it cells (`job`); what an earlier job
 *   the largest exponents; RESULT to all, or again to one  has left there counts as zeros: it had another number
 *   NACK with its reason: SUPERSEDED, HELD_UP, the others  evict: without its bit in `job` the next packet that is
 *   CLOCK and GRANT, cumulative, for any ring              sent again completes what waited for that worker
 *   take a change of policy into use with a CLOCK, once    change the policy (`policy`), and not again before that is
 *   the one before is in effect                            in use (register `job_epoch`, or a GRANT)
 *   INC, once per worker and step; READ                    let one worker go on by name (`until` in `member`)
 *
 * It does not: more than 32 workers; payloads of other than 32 values, LEAVE (both are dropped; who leaves says so to
 * control); statistics of the newest clock, and of when a worker was heard (control looks at `packets`). A rank that
 * was evicted may join again in a job that uses the table, not in the middle of a stream.
 *
 * One packet comes of one. Where the model answers with two (an INC or a READ by which the clock moves), the GRANT to
 * all goes out and the rest is left: it is as if the other packet were lost, and the worker sends it again.
 *
 * All state is read and written in ingress, in one block that is @atomic. Numbers in packets are little-endian, so
 * their bytes are swapped on the way in and out. Numbers of 32 bits wrap around: NEWER looks at their difference.
 */
#include <core.p4>
#include <v1model.p4>

#define JOBS 8
#define MEMBERS 256 /* 32 of each job */
#define CELLS 4096 /* slots and rows of all jobs together, of 32 values each */
#define ADDED 131072 /* 32 workers of each cell */
#define ALL_WORKERS 8w255
#define HALF 32w0x80000000
#define ONES 32w0xFFFFFFFF
#define NO_EXPONENT 8w0x81

#define SWAP16(x) x[7:0] ++ x[15:8]
#define SWAP32(x) x[7:0] ++ x[15:8] ++ x[23:16] ++ x[31:24]
#define NEWER(a, b) ((a) != (b) && ((a) - (b)) < HALF)
#define ABOVE(a, b) (((a) ^ 8w0x80) > ((b) ^ 8w0x80))
#define COUNT_BITS(x) x = x - ((x >> 1) & 0x55555555); x = (x & 0x33333333) + ((x >> 2) & 0x33333333); \
    x = (x + (x >> 4)) & 0x0F0F0F0F; x = x + (x >> 8); x = (x + (x >> 16)) & 0x3F;
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) \
    DO(15) DO(16) DO(17) DO(18) DO(19) DO(20) DO(21) DO(22) DO(23) DO(24) DO(25) DO(26) DO(27) DO(28) DO(29) DO(30) \
    DO(31)
#define EACH_DOWN(DO) DO(31) DO(30) DO(29) DO(28) DO(27) DO(26) DO(25) DO(24) DO(23) DO(22) DO(21) DO(20) DO(19) \
    DO(18) DO(17) DO(16) DO(15) DO(14) DO(13) DO(12) DO(11) DO(10) DO(9) DO(8) DO(7) DO(6) DO(5) DO(4) DO(3) DO(2) \
    DO(1) DO(0)

const bit<16> MAGIC = 0xFB0F; /* 0x0FFB, its bytes as they come */
const bit<4> VERSION = 2;
const bit<16> BARE = 44; /* bytes of UDP without values */
const bit<16> WHOLE = 172; /* and with them */
const bit<32> SEED = 0x0FFBEA75; /* of checksums */
const bit<32> FACTOR = 0x9E3779B5;

/* Kinds of packets. */
const bit<8> JOIN = 1;
const bit<8> JOIN_OK = 2;
const bit<8> DATA = 3;
const bit<8> RESULT = 4;
const bit<8> INC = 5;
const bit<8> INC_OK = 6;
const bit<8> READ = 7;
const bit<8> ROW = 8;
const bit<8> CLOCK = 9;
const bit<8> GRANT = 10;
const bit<8> PROBE = 13;
const bit<8> PROBE_OK = 14;
const bit<8> NACK = 15;

/* Flags of a packet; of a slot, two more. */
const bit<8> FIRST = 1;
const bit<8> PRIME = 2;
const bit<8> PARTIAL = 4;
const bit<8> SATURATED = 8;
const bit<8> COMPLETE = 16;
const bit<8> HAS_VALUES = 32;

/* Reasons for which packets are refused. */
const bit<8> NONE = 0;
const bit<8> UNKNOWN_JOB = 1;
const bit<8> NOT_A_MEMBER = 2;
const bit<8> STALE_COOKIE = 3;
const bit<8> WRONG_PORT = 4;
const bit<8> MALFORMED = 5;
const bit<8> SUPERSEDED = 6;
const bit<8> AHEAD_OF_RING = 7;
const bit<8> WRONG_CLOCK = 8;
const bit<8> HELD_UP = 9;

/* To whom the answer goes. */
const bit<2> TO_NOBODY = 0;
const bit<2> TO_SENDER = 1;
const bit<2> TO_ALL = 2;

header ethernet_t {
    bit<48> dst;
    bit<48> src;
    bit<16> ether_type;
}

header ipv4_t {
    bit<4> version;
    bit<4> ihl;
    bit<8> tos;
    bit<16> total_length;
    bit<16> identification;
    bit<3> flags;
    bit<13> fragment;
    bit<8> ttl;
    bit<8> protocol;
    bit<16> checksum;
    bit<32> src;
    bit<32> dst;
}

header udp_t {
    bit<16> src_port;
    bit<16> dst_port;
    bit<16> total_length;
    bit<16> checksum;
}

/* See offbeat/switch/packet.py. */
header message_t {
    bit<16> magic;
    bit<4> version;
    bit<4> flags;
    bit<8> kind;
    bit<16> job;
    bit<8> worker;
    bit<8> count;
    bit<32> cookie;
    bit<32> clock;
    bit<32> chunk;
    bit<16> slot;
    bit<16> epoch;
    bit<32> bitmap;
    bit<8> exponent;
    bit<8> unused;
    bit<8> window_old;
    bit<8> window_new;
    bit<32> checksum;
}

#define FIELD(i) bit<32> v##i;
header values_t {
    EACH(FIELD)
}

struct headers_t {
    ethernet_t ethernet;
    ipv4_t ipv4;
    udp_t udp;
    message_t message;
    values_t values;
}

struct metadata_t {
    bit<1> is_ours;
    bit<1> joins; /* it is a JOIN that is granted */
    bit<2> to;
    bit<16> job; /* what egress has to know */
    bit<32> receiver;
    /* what the tables say of the job */
    bit<32> index;
    bit<32> owner; /* its number, and one bit more: what an empty register cannot be */
    bit<32> members;
    bit<32> workers;
    bit<32> first_slot;
    bit<32> slots;
    bit<32> first_row;
    bit<32> rows;
    bit<32> ring;
    bit<8> row_exponent;
    bit<32> first_clock;
    bit<16> group;
    /* of its policy */
    bit<8> policy_window;
    bit<8> policy_slack;
    bit<16> policy_epoch;
    bit<32> quorum;
    /* and of the sender */
    bit<32> place; /* in the registers of members */
    bit<32> mask;
    bit<32> cookie;
    bit<9> port;
    bit<32> ip;
    bit<32> first_chunk;
    bit<32> until;
    /* the job's clocks */
    bit<32> low;
    bit<8> window_old;
    bit<8> window_new;
    bit<32> effective;
    bit<16> epoch;
    bit<32> checksum; /* of the packet as it is, bytes as they come */
    /* the answer */
    bit<8> kind;
    bit<8> answer;
    bit<8> reason;
    bit<8> about;
    bit<32> nack_chunk;
    bit<16> nack_attempt;
    bit<8> nack_exponent;
}

parser Parse(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            0x0800: parse_ipv4;
            default: accept;
        }
    }
    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.ihl, hdr.ipv4.flags, hdr.ipv4.fragment, hdr.ipv4.protocol) {
            (4w5, 3w0 &&& 3w1, 13w0, 8w17): parse_udp; /* no options, no fragments */
            default: accept;
        }
    }
    state parse_udp {
        packet.extract(hdr.udp);
        transition select(hdr.udp.total_length) {
            BARE: parse_message;
            WHOLE: parse_message;
            default: accept;
        }
    }
    state parse_message {
        packet.extract(hdr.message);
        transition select(hdr.udp.total_length) {
            WHOLE: parse_values;
            default: accept;
        }
    }
    state parse_values {
        packet.extract(hdr.values);
        transition accept;
    }
}

control Verify(inout headers_t hdr, inout metadata_t meta) {
    apply {
    }
}

/* v1model has types with the names Ingress and Egress; rules call these controls so. */
@name("Ingress")
control SumPackets(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    counter(16, CounterType.packets) refused; /* by reason */
    counter(1, CounterType.packets) damaged;
    counter(MEMBERS, CounterType.packets) duplicates;
    direct_counter(CounterType.packets) packets;

    /* Of each job. */
    register<bit<32>>(JOBS) job_owner;
    register<bit<32>>(JOBS) job_low;
    register<bit<8>>(JOBS) job_window_old;
    register<bit<8>>(JOBS) job_window_new;
    register<bit<32>>(JOBS) job_effective;
    register<bit<16>>(JOBS) job_epoch;

    /* Of each member: whence it joined, its last step that is over, the first chunk whose result it lacks. */
    register<bit<32>>(MEMBERS) joined_cookie;
    register<bit<16>>(MEMBERS) joined_port;
    register<bit<32>>(MEMBERS) finished;
    register<bit<32>>(MEMBERS) acked;

    /* Of each cell, which is a slot or a row. */
    register<bit<32>>(CELLS) cell_owner;
    register<bit<8>>(CELLS) cell_flags;
    register<bit<32>>(CELLS) slot_chunk;
    register<bit<32>>(CELLS) slot_clock;
    register<bit<16>>(CELLS) slot_attempt;
    register<bit<8>>(CELLS) slot_exponent;
    register<bit<32>>(CELLS) slot_seen;

    /* Of each exchange: who contributes. */
    register<bit<32>>(CELLS) settled_owner;
    register<bit<32>>(CELLS) settled_clock;
    register<bit<32>>(CELLS) settled_who;

    /* Of each row and worker: the last step that was added, plus its cookie, which is another for each incarnation. */
    register<bit<32>>(ADDED) added;

#define SUM(i) register<bit<32>>(CELLS) sum##i;
    EACH(SUM)

    /* -- tables -------------------------------------------------------------------------------------------------- */

    action drop() {
        mark_to_drop(standard_metadata);
    }

    action take() {
        meta.is_ours = 1;
    }

    action forward_to(bit<9> port) {
        standard_metadata.egress_spec = port;
    }

    action flood(bit<16> group) {
        standard_metadata.mcast_grp = group;
    }

    action set_job(bit<32> index, bit<32> members, bit<32> workers, bit<32> first_slot, bit<32> slots,
                   bit<32> first_row, bit<32> rows, bit<32> ring, bit<8> exponent, bit<32> clock, bit<16> group) {
        meta.index = index;
        meta.members = members;
        meta.workers = workers;
        meta.first_slot = first_slot;
        meta.slots = slots;
        meta.first_row = first_row;
        meta.rows = rows;
        meta.ring = ring;
        meta.row_exponent = exponent;
        meta.first_clock = clock;
        meta.group = group;
    }

    action set_policy(bit<8> window, bit<8> slack, bit<16> epoch, bit<32> quorum) {
        meta.policy_window = window;
        meta.policy_slack = slack;
        meta.policy_epoch = epoch;
        meta.quorum = quorum;
    }

    action set_member(bit<32> mask, bit<32> cookie, bit<9> port, bit<32> ip, bit<32> chunk, bit<32> until) {
        meta.mask = mask;
        meta.cookie = cookie;
        meta.port = port;
        meta.ip = ip;
        meta.first_chunk = chunk;
        meta.until = until;
    }

    /* Where the switch sums: its address. Foreign packets are forwarded. */
    table service {
        key = {
            hdr.ipv4.dst: exact @name("ip");
            hdr.udp.dst_port: exact @name("udp_port");
        }
        actions = {
            take;
            NoAction;
        }
        size = 8;
        default_action = NoAction();
    }

    table forward {
        key = {
            hdr.ethernet.dst: exact @name("mac");
        }
        actions = {
            forward_to;
            flood;
            drop;
        }
        size = 256;
        default_action = drop();
    }

    table job {
        key = {
            hdr.message.job: exact @name("job");
        }
        actions = {
            set_job;
            NoAction;
        }
        size = JOBS;
        default_action = NoAction();
    }

    table policy {
        key = {
            hdr.message.job: exact @name("job");
        }
        actions = {
            set_policy;
            NoAction;
        }
        size = JOBS;
        default_action = NoAction();
    }

    table member {
        key = {
            hdr.message.job: exact @name("job");
            hdr.message.worker: exact @name("worker");
        }
        actions = {
            set_member;
            NoAction;
        }
        size = MEMBERS;
        default_action = NoAction();
        counters = packets;
    }

    /* -- headers ------------------------------------------------------------------------------------------------- */

    action swap_header() {
        hdr.message.job = SWAP16(hdr.message.job);
        hdr.message.cookie = SWAP32(hdr.message.cookie);
        hdr.message.clock = SWAP32(hdr.message.clock);
        hdr.message.chunk = SWAP32(hdr.message.chunk);
        hdr.message.slot = SWAP16(hdr.message.slot);
        hdr.message.epoch = SWAP16(hdr.message.epoch);
        hdr.message.bitmap = SWAP32(hdr.message.bitmap);
    }

    /* The checksum of what else is in the header and in the values, whose bytes are as they come: see
     * offbeat/switch/checksum.py. */
#define TAKE(x) word = x; word = SWAP32(word); sum = (sum + (word ^ (word >> 16))) * FACTOR;
#define TAKE_VALUE(i) TAKE(hdr.values.v##i)
    action sum_header() {
        bit<32> word;
        bit<32> sum = SEED;
        TAKE(hdr.message.magic ++ hdr.message.version ++ hdr.message.flags ++ hdr.message.kind)
        TAKE(hdr.message.job ++ hdr.message.worker ++ hdr.message.count)
        TAKE(hdr.message.cookie)
        TAKE(hdr.message.clock)
        TAKE(hdr.message.chunk)
        TAKE(hdr.message.slot ++ hdr.message.epoch)
        TAKE(hdr.message.bitmap)
        TAKE(hdr.message.exponent ++ hdr.message.unused ++ hdr.message.window_old ++ hdr.message.window_new)
        meta.checksum = sum;
    }

    action sum_values() {
        bit<32> word;
        bit<32> sum = meta.checksum;
        EACH(TAKE_VALUE)
        meta.checksum = sum;
    }

    /* An answer without values, in which nothing is said yet but for the clock and the chunk. */
    action begin_answer() {
        hdr.message.kind = meta.answer;
        hdr.message.flags = 0;
        hdr.message.worker = meta.about;
        hdr.message.cookie = 0;
        hdr.message.epoch = 0;
        hdr.message.bitmap = 0;
        hdr.message.exponent = 0;
        hdr.message.unused = 0;
        hdr.message.window_old = 0;
        hdr.message.window_new = 0;
    }

    action refuse() {
        hdr.message.chunk = meta.nack_chunk;
        hdr.message.epoch = meta.nack_attempt;
        hdr.message.exponent = meta.nack_exponent;
        hdr.message.window_old = meta.kind;
        hdr.message.window_new = meta.reason;
    }

    action grant() {
        hdr.message.cookie = meta.until;
        hdr.message.clock = meta.low;
        hdr.message.chunk = 0;
        hdr.message.slot = 0;
        hdr.message.epoch = meta.epoch;
        hdr.message.bitmap = meta.effective;
        hdr.message.window_old = meta.window_old;
        hdr.message.window_new = meta.window_new;
    }

    action seal() {
        hdr.message.count = 0;
        hdr.udp.total_length = BARE;
        hdr.udp.checksum = 0; /* none, which IPv4 permits */
        hdr.ipv4.total_length = BARE + 20;
        hdr.ipv4.identification = 0;
        hdr.ipv4.flags = 2;
        hdr.ipv4.ttl = 64;
    }

    action seal_values() {
        hdr.message.count = 2;
        hdr.udp.total_length = WHOLE;
        hdr.ipv4.total_length = WHOLE + 20;
    }

    action reply() {
        bit<48> mac = hdr.ethernet.src;
        bit<32> ip = hdr.ipv4.src;
        bit<16> port = hdr.udp.src_port;
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ethernet.dst = mac;
        hdr.ipv4.src = hdr.ipv4.dst;
        hdr.ipv4.dst = ip;
        hdr.udp.src_port = hdr.udp.dst_port;
        hdr.udp.dst_port = port;
        standard_metadata.egress_spec = standard_metadata.ingress_port;
    }

    /* To all members; egress says where each of them is. */
    action tell_all() {
        hdr.message.worker = ALL_WORKERS;
        hdr.ethernet.src = hdr.ethernet.dst;
        hdr.ipv4.src = hdr.ipv4.dst;
        hdr.udp.src_port = hdr.udp.dst_port;
        standard_metadata.egress_spec = 0;
        standard_metadata.mcast_grp = meta.group;
    }

    /* -- packets ------------------------------------------------------------------------------------------------- */

    apply {
        meta.is_ours = 0;
        meta.joins = 0;
        meta.to = TO_NOBODY;
        if (hdr.udp.isValid()) {
            service.apply();
        }
        if (meta.is_ours == 0) {
            forward.apply();
        } else {
            mark_to_drop(standard_metadata); /* unless there is an answer */
            bool is_read = false;
            if (hdr.message.isValid()) {
                bit<8> kind = hdr.message.kind;
                bool is_known = kind == JOIN || kind == DATA || kind == INC || kind == READ || kind == CLOCK ||
                                kind == PROBE;
                bool is_whole = (hdr.values.isValid() && hdr.message.count == 2) ||
                                (!hdr.values.isValid() && hdr.message.count == 0);
                is_read = is_known && is_whole && hdr.message.magic == MAGIC && hdr.message.version == VERSION;
            }
            if (is_read) {
                sum_header();
                if (hdr.values.isValid()) {
                    sum_values();
                }
                if (meta.checksum != SWAP32(hdr.message.checksum)) {
                    damaged.count(0);
                    is_read = false;
                }
            }
            if (is_read) {
                @atomic {
                    bit<32> there;
                    bit<32> over;
                    bit<32> keeps = 0; /* ONES if there are values, 0 if they are still zeros */
                    bit<32> takes = 0; /* ONES if the packet's values count, 0 to read values only */
                    bit<32> compares = 0; /* ONES to keep the larger of both, 0 to add */
                    bit<32> cell = 0;
                    bit<8> flags = 0; /* of the cell */
                    bool passes = false; /* whether values are looked at */
                    bool sends_values = false;

                    swap_header();
                    meta.kind = hdr.message.kind;
                    meta.about = hdr.message.worker;
                    meta.job = hdr.message.job;
                    meta.owner = (bit<32>)hdr.message.job | 0x10000;
                    meta.reason = NONE;
                    meta.answer = NACK;
                    meta.nack_chunk = hdr.message.chunk;
                    meta.nack_attempt = 0;
                    meta.nack_exponent = 0;

                    /* Who sends it? */
                    if (job.apply().hit) {
                        policy.apply();
                        if (member.apply().hit) {
                            meta.place = (meta.index << 5) + (bit<32>)hdr.message.worker;
                            meta.receiver = meta.place;
                            job_owner.read(there, meta.index);
                            if (there != meta.owner) { /* the job's first packet: what is left is an earlier job's */
                                job_owner.write(meta.index, meta.owner);
                                job_low.write(meta.index, meta.first_clock);
                                job_window_old.write(meta.index, meta.policy_window);
                                job_window_new.write(meta.index, meta.policy_window);
                                job_effective.write(meta.index, meta.first_clock);
                                job_epoch.write(meta.index, meta.policy_epoch);
#define RESET(w) joined_port.write((meta.index << 5) + w, 0); acked.write((meta.index << 5) + w, 0); \
                 finished.write((meta.index << 5) + w, meta.first_clock);
                                EACH(RESET)
                            }
                            job_low.read(meta.low, meta.index);
                            job_window_old.read(meta.window_old, meta.index);
                            job_window_new.read(meta.window_new, meta.index);
                            job_effective.read(meta.effective, meta.index);
                            job_epoch.read(meta.epoch, meta.index);

                            bit<16> port;
                            joined_cookie.read(there, meta.place);
                            joined_port.read(port, meta.place);
                            bool is_bound = port != 0 && there == meta.cookie;
                            bool is_where = standard_metadata.ingress_port == meta.port && hdr.ipv4.src == meta.ip;
                            if (hdr.message.cookie != meta.cookie) {
                                meta.reason = STALE_COOKIE;
                            } else if (!is_where || (is_bound && port != hdr.udp.src_port) ||
                                       (!is_bound && meta.kind != JOIN)) {
                                meta.reason = WRONG_PORT;
                            } else if (!is_bound) {
                                joined_cookie.write(meta.place, meta.cookie);
                                joined_port.write(meta.place, hdr.udp.src_port);
                                finished.write(meta.place, meta.low);
                                acked.write(meta.place, meta.first_chunk);
                            }
                        } else {
                            meta.reason = NOT_A_MEMBER;
                        }
                    } else {
                        meta.reason = UNKNOWN_JOB;
                    }

                    /* What does it say of clocks? */
                    bit<32> own = 0;
                    bit<32> finishes = hdr.message.clock; /* the step that is over by it */
                    bool is_over = false;
                    bool is_duplicate = false;
                    bool tells = false; /* whether all are to learn the clocks */
                    bit<32> step = 0;
                    bit<32> lead = hdr.message.clock - meta.low;
                    lead = lead < HALF ? lead : 0;
                    if (meta.reason == NONE) {
                        finished.read(own, meta.place);
                        step = hdr.message.clock - own;
                        if (meta.kind == CLOCK) {
                            bool is_in_effect = !NEWER(meta.effective - 1, meta.low);
                            if (meta.policy_epoch != meta.epoch && is_in_effect) {
                                meta.window_old = meta.window_new;
                                meta.window_new = meta.policy_window;
                                meta.effective = meta.low + (bit<32>)meta.policy_slack + 1;
                                meta.epoch = meta.policy_epoch;
                                job_window_old.write(meta.index, meta.window_old);
                                job_window_new.write(meta.index, meta.window_new);
                                job_effective.write(meta.index, meta.effective);
                                job_epoch.write(meta.index, meta.epoch);
                                tells = true;
                            }
                            if (lead > meta.ring - 2) {
                                meta.reason = AHEAD_OF_RING;
                            }
                            is_over = lead != 0;
                        } else if (meta.kind == READ) {
                            if (hdr.message.chunk >= meta.rows) {
                                meta.reason = MALFORMED;
                            } else if (lead > meta.ring - 2) {
                                meta.reason = AHEAD_OF_RING;
                            }
                            is_over = lead != 0;
                        } else if (meta.kind == INC) {
                            if (step < HALF && step > meta.ring - 1) {
                                meta.reason = WRONG_CLOCK;
                            } else if (hdr.message.chunk >= meta.rows || !hdr.values.isValid() ||
                                       hdr.message.exponent != meta.row_exponent) {
                                meta.reason = MALFORMED;
                            }
                            is_over = step < HALF && step > 1; /* it would not have begun this one else */
                            finishes = hdr.message.clock - 1;
                        } else if (meta.kind == DATA) {
                            if ((bit<32>)hdr.message.slot != (hdr.message.chunk & (meta.slots - 1))) {
                                meta.reason = MALFORMED;
                            }
                        }
                    }
                    if (is_over && meta.reason == NONE) {
                        bit<32> least = HALF; /* further than any clock */
                        if (NEWER(finishes, own)) {
                            finished.write(meta.place, finishes);
                        }
#define LEAST(w) finished.read(there, (meta.index << 5) + w); there = there - meta.low; \
                 there = there < HALF ? there : 0; \
                 least = ((meta.members & (32w1 << w)) != 0 && there < least) ? there : least;
                        EACH(LEAST)
                        if (least != 0 && least != HALF) {
                            meta.low = meta.low + least;
                            job_low.write(meta.index, meta.low);
                            tells = true;
                        }
                    }

                    /* What does it ask for? */
                    bit<32> chunk = hdr.message.chunk;
                    bit<32> clock = hdr.message.clock;
                    bit<16> attempt = hdr.message.epoch;
                    bit<8> exponent = NO_EXPONENT;
                    bit<32> seen = 0;
                    bool is_stored = false; /* whether the cell has changed */
                    if (meta.reason != NONE) {
                        meta.to = TO_SENDER;
                    } else if (tells) {
                        meta.answer = GRANT;
                        meta.to = TO_ALL;
                    } else if (meta.kind == CLOCK) {
                        meta.answer = GRANT;
                        bit<8> window = NEWER(meta.effective, clock) ? meta.window_old : meta.window_new;
                        if (lead <= (bit<32>)window || NEWER(meta.until, clock)) {
                            meta.to = TO_SENDER;
                        }
                    } else if (meta.kind == JOIN) {
                        meta.answer = JOIN_OK;
                        meta.joins = 1;
                        meta.to = TO_SENDER;
                    } else if (meta.kind == PROBE) {
                        meta.answer = PROBE_OK;
                        meta.to = TO_SENDER;
                    } else if (meta.kind == DATA) {
                        /* -- a chunk ----------------------------------------------------------------------------- */
                        bit<32> exchange = meta.first_slot + (clock & (meta.slots - 1));
                        bit<32> who;
                        meta.answer = RESULT;
                        acked.read(there, meta.place);
                        if (NEWER(hdr.message.bitmap, there)) {
                            acked.write(meta.place, hdr.message.bitmap);
                        }
                        settled_owner.read(there, exchange);
                        settled_clock.read(over, exchange);
                        settled_who.read(who, exchange);
                        bool is_settled = there == meta.owner && over == clock;
                        who = is_settled ? who : 0;
                        bit<8> given = (bit<8>)hdr.message.flags;
                        bool is_in = (given & PRIME) != 0 || (who & meta.mask) != 0;
                        bool is_none_left = is_settled && (who & meta.members) == 0;

                        cell = meta.first_slot + (chunk & (meta.slots - 1));
                        cell_owner.read(there, cell);
                        bool is_used = there == meta.owner;
                        slot_chunk.read(there, cell);
                        bit<32> further = chunk - there;
                        slot_attempt.read(attempt, cell);
                        bool is_older = is_used && (further >= HALF || (further == 0 && hdr.message.epoch < attempt));
                        bool is_new = !is_used || further != 0 || hdr.message.epoch > attempt;
                        if (is_older) {
                            meta.reason = SUPERSEDED;
                            meta.nack_chunk = there;
                            meta.nack_attempt = attempt;
                            slot_exponent.read(meta.nack_exponent, cell);
                        } else if (!is_new || is_in || is_none_left) {
                            if (is_used && further != 0) {
                                bit<8> lacking = ALL_WORKERS;
#define LACKS(w) acked.read(over, (meta.index << 5) + w); \
                 lacking = ((meta.members & (32w1 << w)) != 0 && !NEWER(over, there)) ? 8w##w : lacking;
                                EACH_DOWN(LACKS)
                                if (lacking != ALL_WORKERS) {
                                    meta.reason = HELD_UP;
                                    meta.about = lacking;
                                }
                            }
                            is_stored = meta.reason == NONE;
                        }
                        if (is_stored) {
                            attempt = hdr.message.epoch;
                            if (is_new) {
                                flags = given & (FIRST | PRIME);
                            } else {
                                cell_flags.read(flags, cell);
                                slot_clock.read(clock, cell);
                                slot_exponent.read(exponent, cell);
                                slot_seen.read(seen, cell);
                            }
                            keeps = (flags & HAS_VALUES) != 0 ? ONES : 0;
                            compares = (flags & PRIME) != 0 ? keeps : 0;
                            if ((flags & COMPLETE) != 0) {
                                meta.to = TO_SENDER;
                            } else {
                                if ((seen & meta.mask) == 0 && is_in) {
                                    exponent = ABOVE(hdr.message.exponent, exponent) ? hdr.message.exponent : exponent;
                                    flags = flags | (given & SATURATED);
                                    seen = seen | meta.mask;
                                    if (hdr.values.isValid()) {
                                        takes = ONES;
                                        flags = flags | HAS_VALUES;
                                    }
                                } else {
                                    is_duplicate = true;
                                }
                                bit<32> needed = meta.members;
                                bit<32> here = seen & meta.members;
                                bit<32> all = who & meta.members;
                                COUNT_BITS(needed)
                                COUNT_BITS(here)
                                needed = (meta.quorum != 0 && meta.quorum < needed) ? meta.quorum : needed;
                                bool is_first = (flags & FIRST) != 0;
                                if ((is_first && here >= needed) || (!is_first && is_settled && (seen & all) == all)) {
                                    flags = flags | COMPLETE;
                                    meta.to = TO_ALL;
                                    there = seen;
                                    COUNT_BITS(there)
                                    if (there < meta.workers) {
                                        flags = flags | PARTIAL;
                                    }
                                    if (is_first) {
                                        settled_owner.write(exchange, meta.owner);
                                        settled_clock.write(exchange, clock);
                                        settled_who.write(exchange, seen & meta.members);
                                    }
                                }
                            }
                            sends_values = meta.to != TO_NOBODY && (flags & HAS_VALUES) != 0;
                            passes = takes != 0 || sends_values;
                        } else if (meta.reason != NONE) {
                            meta.answer = NACK;
                            meta.to = TO_SENDER;
                        }
                    } else {
                        /* -- a row ------------------------------------------------------------------------------- */
                        cell = meta.first_row + chunk;
                        cell_owner.read(there, cell);
                        if (there == meta.owner) {
                            keeps = ONES;
                            cell_flags.read(flags, cell);
                        }
                        meta.to = TO_SENDER;
                        if (meta.kind == READ) {
                            meta.answer = ROW;
                            passes = true;
                            sends_values = true;
                        } else {
                            bit<32> tag = (cell << 5) + (bit<32>)hdr.message.worker;
                            meta.answer = INC_OK;
                            added.read(there, tag);
                            if (step == 0 || step >= HALF || there == clock + meta.cookie) {
                                is_duplicate = true;
                            } else {
                                added.write(tag, clock + meta.cookie);
                                takes = ONES;
                                passes = true;
                            }
                        }
                        is_stored = passes;
                    }

                    /* The values: each is added within 32 bits, or compared, kept, and put into the packet. */
                    bit<32> overflows = 0;
                    if (passes) {
                        bit<32> kept;
                        bit<32> addend;
                        bit<32> total;
                        bit<32> larger;
                        hdr.values.setValid();
#define ADD(i) sum##i.read(kept, cell); kept = kept & keeps; addend = SWAP32(hdr.values.v##i); \
               addend = addend & takes; larger = (kept ^ HALF) > (addend ^ HALF) ? kept : addend; \
               total = kept + addend; over = (kept ^ total) & (addend ^ total) & ~compares; \
               overflows = overflows | over; kept = addend < HALF ? 32w0x7FFFFFFF : HALF; \
               total = over < HALF ? total : kept; total = (compares & takes) != 0 ? larger : total; \
               sum##i.write(cell, total); hdr.values.v##i = SWAP32(total);
                        EACH(ADD)
                    }
                    if (overflows >= HALF) {
                        flags = flags | SATURATED;
                    }
                    if (is_stored) {
                        cell_owner.write(cell, meta.owner);
                        cell_flags.write(cell, flags);
                    }
                    if (is_stored && meta.kind == DATA) {
                        slot_chunk.write(cell, chunk);
                        slot_clock.write(cell, clock);
                        slot_attempt.write(cell, attempt);
                        slot_exponent.write(cell, exponent);
                        slot_seen.write(cell, seen);
                    }
                    if (is_duplicate) {
                        duplicates.count(meta.place);
                    }

                    /* The answer. */
                    if (meta.to != TO_NOBODY) {
                        bit<32> asked = hdr.message.clock;
                        begin_answer();
                        if (meta.answer == NACK) {
                            refuse();
                            refused.count((bit<32>)meta.reason);
                        } else if (meta.answer == RESULT) {
                            hdr.message.flags = flags[3:0];
                            hdr.message.clock = clock;
                            hdr.message.epoch = attempt;
                            hdr.message.bitmap = seen;
                            hdr.message.exponent = exponent;
                        } else if (meta.answer == INC_OK) {
                            hdr.message.flags = flags[3:0];
                            hdr.message.slot = 0;
                        } else if (meta.answer == ROW) {
                            hdr.message.flags = flags[3:0];
                            hdr.message.clock = meta.low;
                            hdr.message.slot = 0;
                            hdr.message.epoch = meta.epoch;
                            hdr.message.bitmap = asked;
                            hdr.message.exponent = meta.row_exponent;
                        } else {
                            grant();
                        }
                        seal();
                        if (sends_values) {
                            seal_values();
                        } else {
                            hdr.values.setInvalid();
                        }
                        if (meta.to == TO_SENDER) {
                            reply();
                        } else {
                            if (meta.answer == GRANT) {
                                hdr.message.cookie = 0;
                            }
                            tell_all();
                        }
                    }
                    swap_header();
                    if (meta.to != TO_NOBODY) {
                        sum_header();
                        if (hdr.values.isValid()) {
                            sum_values();
                        }
                        hdr.message.checksum = SWAP32(meta.checksum);
                    }
                }
            }
        }
    }
}

@name("Egress")
control AddressCopies(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard_metadata) {
    register<bit<16>>(MEMBERS) receiver_port;

    action set_receiver(bit<48> mac, bit<32> ip, bit<32> place) {
        hdr.ethernet.dst = mac;
        hdr.ipv4.dst = ip;
        meta.receiver = place;
    }

    /* Where each copy of a packet to all goes. */
    table receiver {
        key = {
            meta.job: exact @name("job");
            standard_metadata.egress_rid: exact @name("worker");
        }
        actions = {
            set_receiver;
            NoAction;
        }
        size = MEMBERS;
        default_action = NoAction();
    }

    apply {
        if (meta.joins == 1) {
            receiver_port.write(meta.receiver, hdr.udp.dst_port);
        } else if (meta.to == TO_ALL) {
            bit<16> port = 0;
            if (receiver.apply().hit) {
                receiver_port.read(port, meta.receiver);
            }
            if (port == 0) { /* it has not joined */
                mark_to_drop(standard_metadata);
            }
            hdr.udp.dst_port = port;
        }
    }
}

control Compute(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(hdr.ipv4.isValid() && hdr.ipv4.ihl == 5,
                        { hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.tos, hdr.ipv4.total_length,
                          hdr.ipv4.identification, hdr.ipv4.flags, hdr.ipv4.fragment, hdr.ipv4.ttl,
                          hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst },
                        hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control Deparse(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
        packet.emit(hdr.message);
        packet.emit(hdr.values);
    }
}

V1Switch(Parse(), Verify(), SumPackets(), AddressCopies(), Compute(), Deparse()) main;
