"""Limits on data that remote peers can grow, each with its reason."""

from __future__ import annotations

MIB = 2**20

CONTROL_FRAME_MAX = (
    2 * MIB
)  # bytes; a vertex lists each part's contributors: 40 members of 7 billion values in fp32
BULK_FRAME_MAX = 64 * MIB  # bytes; one part of one update. The plan splits larger parts
BLOB_CHUNK = 1 * MIB  # bytes; big enough to amortize a request, small enough to fetch from many peers
BLOB_MAX = 64 * 2**30  # bytes; a manifest of such a blob (2 MiB of chunk hashes) still fits one bulk frame
PEERS_MAX = 4096  # members of one run; the member list travels in every vertex
FULL_MESH_MAX = 64  # peers in a full mesh of connections
COMMITTEE_MAX = 32  # voters per round by default: messages grow with its square
COMMITTEE_MOST = 128  # voters per round that genesis may set: a drawn committee has the share of liars of its draw
PEER_ID_CHARACTERS_MAX = 64  # characters of a peer id: base58 of an Ed25519 key has 52
PARTS_MAX = 16  # parts of one update: owners send to all members, members send to every owner
PIECES_MAX = 64  # pieces of one owner's share; genesis may be a stranger's, and every part costs messages
PARTS_AIM = 32  # parts of an update on slow links: while some are combined and answered, others are on their way
PART_BYTES_AIM = 2 * MIB  # bytes of a part in fp32 below which more parts would only cost messages
PARTS_OF_ANY = 2**12  # parts of one update of any size in what peers show each other
PART_BYTES_MAX = (
    48 * MIB
)  # bytes of an encoded part: below a bulk frame, with room for the largest codec's overhead
CODEC_EXTRA = 4  # a wire is at most 1/4 longer than its values in fp32: indices of a top-k of all values are 6 %
HELD_BYTES_MAX = 128 * MIB  # bytes of combined parts in memory; parts of rounds before the current one go first
ROUNDS_ON_DISK = 8  # rounds with larger parts in files while a member is behind: its state may take as long
PART_GIVEN_MAX = 4  # times that a peer gets one part per attempt, or after the round: each may be lost
PART_GIVEN_S = 60.0  # seconds until these times count anew: a group's attempts have no end, and connections break
OWNERS_PER_PART = 6  # takeover chain: after five simultaneous deaths every part still has an owner
OWNER_WINDOWS = 3  # sub-deadlines in the plan; owners after the third replace dead owners, not late ones
EARLY_MESSAGES_MAX = 2048  # messages for future rounds; older ones are dropped first
EARLY_BYTES_MAX = 256 * MIB  # bytes of their payloads and bodies
UPDATES_KEPT_MAX = 200  # rounds with rows on disk: their vertices must still be in memory, which holds 256
ROUNDS_KEPT = 32  # rounds with combined parts for laggards, as far as HELD_BYTES_MAX allows
EARLY_PER_SENDER_MAX = 256  # early messages of one peer: a flood displaces only its own messages
EARLY_ROUNDS = 2  # rounds ahead of the local one with stored messages; peers further ahead send vertices
REPORTS_PER_VERTEX_MAX = 256  # signed member reports in one vertex
VOICES_MAX = 1024  # threshold reports in memory: 34 of a hundred members against each of thirty at once
REPORTS_BYTES_MAX = (
    MIB // 4
)  # bytes of a vertex's reports, so that a proposal fits a control frame; a join is ~7 kB
PROPOSAL_BYTES_MAX = MIB // 16  # bytes beside a body in its frame: timeouts and certificate of 128 voters are 52 kB
BODY_BYTES_MAX = CONTROL_FRAME_MAX - PROPOSAL_BYTES_MAX  # bytes; a longer body could be agreed but not sent
COMMIT_BYTES_MAX = 1536  # bytes of a commitment: text and links are a kilobyte, and a newer peer may add fields
ANSWER_BYTES_MAX = 256  # bytes of a result without contributor names: 200, and a newer peer may add fields
WEIGHED_ROWS_MAX = FULL_MESH_MAX  # rows with pairwise distances: products of 64 rows are 17 kB per part
ERA_ROUNDS_MAX = 128  # rounds of an era: half of the vertices in memory, so the era's start is in memory at its end
ERAS_LACKING_MAX = 1024  # eras in memory that lack signatures, a few kB each; older ones stay on disk
ERAS_READ_AT_ONCE = 8  # eras read from disk at once, for peers that catch up
TICKETS_MAX = 256  # unexpired invitations of one run; they travel in every vertex
TICKET_MOST_S = (
    366 * 86400.0
)  # seconds that an invitation may last: its line stays in every vertex until it expires
REPORT_BYTES_MAX = (
    MIB // 8
)  # bytes of one report: an accusation holds two results with up to 1000 contributors each
OPENED_BYTES_MAX = MIB // 64  # bytes of a cached verified statement: 2048 of them are 32 MiB
SIGNATURE_BYTES_MAX = 4096  # bytes of a signature: 64, with ML-DSA-65 3309, of a long-lived identity both
IDENTITY_BYTES_MAX = 2048  # bytes of an identity's public keys: 1990
TICKET_BYTES_MAX = 64  # bytes of a ticket's id (16) or public key (32): a redemption checks the exact length
ADMISSION_BYTES_MAX = 128  # bytes of a redemption: ticket id and signature, 80
VOTE_KEY_BYTES_MAX = 64  # bytes of a session key: 32; policy/signing.py has the limits for ML-DSA-65 sessions
VOTE_ROUNDS_MAX = 65_535  # counted rounds that a vertex distinguishes: three bytes per member
MISSED_MAX = 1_000_000  # rounds missed in a row; higher counts are equal
SCORE_ONE = 10_000  # best reputation, in ten-thousandths; a score takes three bytes in a vertex
CHECK_NAME_MAX = 32  # characters of the name of a check
CHECK_NUMBERS_MAX = 16  # numbers that a drawn member reports about one update
WORDS_MAX = 200  # characters of a reason in a report
ADDRESSES_MAX = 8  # multiaddrs announced by one peer
EXTENSIONS_MAX = 8  # extensions of one member
EXTENSION_NAME_MAX = 32  # characters of an extension's name
EXTENSIONS_BYTES_MAX = 512  # bytes of a member's extensions, names included: they stay in every vertex
ADDRESS_BYTES_MAX = 256  # bytes of one multiaddr
DATA_SHARDS_MAX = 8  # open shards of one reader: they stay in every vertex
DATA_RANGES_MAX = 12  # ranges of samples behind one update, 20 bytes each: those of all open shards, and late ones
SEGMENT_STEPS = 10  # steps that an auditor replays: noise grows per step, 1e-7 of a gradient becomes 1e-4 after ten
BRANCHES_MAX = (
    8  # branches of one run, stored by their first vertex; each is a manual recovery beside a live quorum
)
APART_ROUNDS_MAX = 1000  # rounds' worth of steps that a partitioned member may take: days of rounds of ten minutes
AUDIT_ROUNDS = 32  # rounds in which an audit is open; later its data is dropped
AUDIT_TURN = 8  # rounds of these for one auditor; evidence may be megabytes and is made while the trainer is idle
PAIRED_MAX = 64  # members of a group with random pairs: each reports its current holdings to all, 16 bytes
VALIDATION_ROUNDS = 128  # rounds that verdicts on states look back: half of the vertices in memory
VALIDATION_OPEN = 16  # rounds in which reports on a state count: validating takes seconds, rounds may be shorter
SCORERS_MOST = 5  # scorers of one update: each downloads it and takes a step along it
SCORE_OPEN = 16  # rounds in which scores of an update count: scoring takes seconds, rounds may be shorter
CODED_PIECES_MAX = 32  # pieces of one erasure-coded state: the most that liberasurecode supports
CODED_STATES_MAX = 64  # erasure-coded states: a week of ten-minute rounds, with a state every two or three hours
OPENED_BLOCKS_MAX = 2**14  # blocks of one part opened to one member: 4096 values each
LEAF_BYTES_MAX = MIB // 64 + 256  # bytes of one block in a wire with its scales: 4096 values in fp32, the longest
ROW_SHOWN_MAX = MIB // 16  # bytes of a row that is shown whole, in runs without leaves: it goes to all voters
MALFORMED_ROW_BYTES_MAX = 2 * ROW_SHOWN_MAX  # bytes of the evidence of an unreadable row, with paths and commitment
PATH_MAX = 32  # digests between a leaf and its root: more levels than any tree here has
CLOCK_ZONE_S = 86400.0  # seconds tolerated between wall clocks: a wrong time zone is off by up to 14 hours
WINDOW_LEAST_S = 0.02  # least seconds of any interval in genesis: shorter beats and attempts only keep members busy
WINDOW_MOST_S = 1e9  # seconds, 30 years: sums of several are still exact to the microsecond
FACTOR_MOST = 1e6  # rate, norm or momentum in genesis: a state in fp32 diverges long before
AMOUNT_MOST = 2**42  # values of a model, bytes of an update: 4 TiB, sixty times the largest blob
CLOCK_FAR_S = 60.0  # seconds from the local clock beyond which run time needs replies of most watched peers
CLOCK_MOST_S = 2.0**32  # seconds between clocks, a century: larger differences are no clock error
CLOCK_WRONG_S = (
    90.0  # seconds ahead of run time that prove wrong clocks in a vertex; the next vertex corrects the time
)
CLOCK_BOUND_S = 0.250  # seconds of offset from run time beyond which a peer is warned and owns no part
TICKET_CHARACTERS_MAX = 600  # fits a QR code that a phone reads from a terminal
