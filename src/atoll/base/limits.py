"""Every bound on what strangers can make us hold, each with its reason."""

from __future__ import annotations

MIB = 2**20

CONTROL_FRAME_MAX = 2 * MIB  # bytes; a vertex names who is in each part: 40 members of 7 billion values in fp32
BULK_FRAME_MAX = 64 * MIB  # bytes; one part of one update. Larger parts are cut by the plan
BLOB_CHUNK = 1 * MIB  # bytes; big enough to amortise a request, small enough to fetch from many peers
BLOB_MAX = 64 * 2**30  # bytes; a manifest of such a blob (2 MiB of chunk hashes) still fits one bulk frame
PEERS_MAX = 4096  # members of one run; the member list travels in every vertex
FULL_MESH_MAX = 64  # peers that hold a connection to everybody
COMMITTEE_MAX = 32  # voters per round, where genesis says nothing else: messages grow with its square
COMMITTEE_MOST = 128  # that genesis may ask for: a drawn committee has the share of liars that the draw gives it
PARTS_MAX = 16  # parts of one update: owners send to everyone, members send to every owner
PIECES_MAX = 64  # that one owner's share is cut into; genesis may be a stranger's, and every part costs messages
PART_BYTES_MAX = 48 * MIB  # of an encoded part: below a bulk frame, with room for the largest codec's extras
CODEC_EXTRA = 4  # a wire is at most this part longer than its values in fp32: places of a top-k of all are 6 %
HELD_BYTES_MAX = 512 * MIB  # combined parts of recent rounds in memory; older ones than the current go first
PART_GIVEN_MAX = 4  # times that one peer is given one part per attempt, or after the round: any may be lost
PART_GIVEN_S = 60.0  # after which an attempt counts anew: a group's have no end, and a connection may break in one
OWNERS_PER_PART = 6  # takeover chain: five that die at once leave every part somebody to combine it
OWNER_WINDOWS = 3  # sub-deadlines in the plan; owners behind the third stand in for the gone, not for the late
EARLY_MESSAGES_MAX = 2048  # messages for a round not reached yet; older ones are dropped first
EARLY_BYTES_MAX = 256 * MIB  # their payloads and bodies
UPDATES_KEPT_MAX = 200  # rounds whose rows stay on a disk: their vertices must still be in memory, which holds 256
ROUNDS_KEPT = 32  # rounds whose combined parts are served to laggards, as far as HELD_BYTES_MAX allows
EARLY_PER_SENDER_MAX = 256  # of those, from one peer: a flood displaces only its own words
EARLY_ROUNDS = 2  # rounds ahead of mine that are remembered; whoever is further ahead sends me vertices
REPORTS_PER_VERTEX_MAX = 256  # signed member reports carried by one vertex
VOICES_MAX = 1024  # reports in memory that only count together: 34 of a hundred against each of thirty at once
REPORTS_BYTES_MAX = MIB // 4  # of those together, so that a proposal fits a control frame; a join is ~7 kB
PROPOSAL_BYTES_MAX = MIB // 16  # beside a body in its frame: timeouts and certificate of 128 voters are 52 kB
BODY_BYTES_MAX = CONTROL_FRAME_MAX - PROPOSAL_BYTES_MAX  # a longer one could be agreed on and shown to nobody
COMMIT_BYTES_MAX = 1536  # of a commitment: words and links are a kilobyte, and a newer peer may say more
ANSWER_BYTES_MAX = 256  # of an answer, but for the names of its contributors: 200, and a newer peer may say more
WEIGHED_ROWS_MAX = FULL_MESH_MAX  # whose distances are taken: products of 64 rows are 17 kB per part
ERA_ROUNDS_MAX = 128  # half of the vertices in memory: what an era began with is at hand when it ends
ERAS_LACKING_MAX = 1024  # eras in memory that lack signatures, a few kB each; older ones stay as they are on disk
ERAS_READ_AT_ONCE = 8  # from disk, for those who catch up
TICKETS_MAX = 256  # invitations of one run that are good at a time; they travel in every vertex
REPORT_BYTES_MAX = MIB // 8  # of one: what was caught holds two answers, and each may list a thousand contributors
OPENED_BYTES_MAX = MIB // 64  # of a statement that is remembered as opened: 2048 of those are 32 MiB
VOTE_KEY_BYTES_MAX = 64  # of a session key: 32; where sessions sign with ML-DSA-65 policy/signing.py has bounds
MISSED_MAX = 1_000_000  # rounds missed in a row; more are not told apart
SCORE_ONE = 10_000  # the best reputation, in ten-thousandths; one takes three bytes in a vertex
WORDS_MAX = 200  # characters of a reason that somebody gives
ADDRESSES_MAX = 8  # multiaddrs announced by one peer
ADDRESS_BYTES_MAX = 256  # one multiaddr
SEGMENT_STEPS = 10  # that an auditor takes again: noise grows with every step, 1e-7 of a gradient is 1e-4 of ten
BRANCHES_MAX = 8  # of one run, kept by their first vertex: recoveries that were none, by hand
APART_ROUNDS_MAX = 1000  # worth of steps that a member may take alone: days of rounds of ten minutes
AUDIT_ROUNDS = 32  # for which an audit is open; older ones were not done in time, and what they need is forgotten
AUDIT_TURN = 8  # of those, that one auditor has; a show may be megabytes, and is made while the trainer rests
PAIRED_MAX = 64  # members that are drawn in pairs: each tells everybody what it holds now, in 32 bytes
STATE_KEPT_ROUNDS = 32  # for which a roll names the state of a member that does not train any more
VALIDATION_ROUNDS = 128  # that verdicts on states look back; half of the vertices in memory
VALIDATION_OPEN = 16  # rounds in which a state may be spoken of: looking takes seconds, rounds may take less
SCORERS_MOST = 5  # of one update: each of them takes a step along it, and downloads it
SCORE_OPEN = 16  # rounds in which an update may be spoken of: looking takes seconds, rounds may take less
CODED_PIECES_MAX = 32  # that one state is cut into: as many as liberasurecode can
CODED_STATES_MAX = 64  # in pieces: a week of rounds of ten minutes, at a state in two or three hours
OPENED_BLOCKS_MAX = 2**14  # of one part, shown to one member: 4096 values each
LEAF_BYTES_MAX = MIB // 64 + 256  # of one of them in a wire, with its scales: 4096 values in fp32, the longest
ROW_SHOWN_MAX = MIB // 16  # of a row that is shown whole where rows have no leaves: it goes to all who vote
UNREADABLE_BYTES_MAX = 2 * ROW_SHOWN_MAX  # of what shows that it cannot be read: its paths and commitment, too
PATH_MAX = 32  # digests between a leaf and its root: more than any tree here has levels
DAY_S = 86400.0  # the difference of clocks that is put up with: a time zone taken wrong is up to 14 hours
CLOCK_FAR_S = 60.0  # a clock that is farther from mine moves me only by the word of most whom I watch
CLOCK_MOST_S = 2.0**32  # apart, a century: beyond that a float tells no seconds, and no clock is so wrong
CLOCK_WRONG_S = (
    600.0  # a vertex that is this much ahead of run time was made by wrong clocks; the next sets it right
)
CLOCK_BOUND_S = 0.250  # beyond this offset from run time a peer is told so and owns nothing
TICKET_CHARACTERS_MAX = 600  # fits a QR code that a phone reads from a terminal
