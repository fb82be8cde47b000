"""Every bound on what strangers can make us hold, each with its reason."""

from __future__ import annotations

MIB = 2**20

CONTROL_FRAME_MAX = 1 * MIB  # bytes; a vertex of 64 members with certificates is ~300 kB
BULK_FRAME_MAX = 64 * MIB  # bytes; one part of one update. Larger parts are cut by the plan
BLOB_CHUNK = 1 * MIB  # bytes; big enough to amortise a request, small enough to fetch from many peers
BLOB_MAX = 64 * 2**30  # bytes; a manifest of such a blob (2 MiB of chunk hashes) still fits one bulk frame
PEERS_MAX = 4096  # members of one run; the member list travels in every vertex
FULL_MESH_MAX = 64  # peers that hold a connection to everybody
COMMITTEE_MAX = 32  # voters per round; votes are all-to-all, so messages grow with its square
PARTS_MAX = 16  # parts of one update: owners send to everyone, members send to every owner
PIECES_MAX = 64  # that one owner's share is cut into; genesis may be a stranger's, and every part costs messages
PART_BYTES_MAX = (
    48 * MIB
)  # of an encoded part; keeps it below a bulk frame with room for the largest codec's extras
HELD_BYTES_MAX = 512 * MIB  # combined parts of recent rounds in memory; older ones than the current go first
OWNERS_PER_PART = 6  # takeover chain: five that die at once leave every part somebody to combine it
OWNER_WINDOWS = (
    3  # sub-deadlines in the plan; owners behind the third are for those that are gone, not for the late
)
ATTEMPTS_MAX = 64  # windows grow 1.5x per attempt: attempt 20 already waits an hour
EARLY_MESSAGES_MAX = 2048  # messages for a round not reached yet; older ones are dropped first
EARLY_BYTES_MAX = 256 * MIB  # their payloads
ROUNDS_KEPT = 32  # rounds whose combined parts are served to laggards, as far as HELD_BYTES_MAX allows
EARLY_PER_SENDER_MAX = 256  # of those, from one peer: a flood displaces only its own words
EARLY_ROUNDS = 2  # rounds ahead of mine that are remembered; whoever is further ahead sends me vertices
REPORTS_PER_VERTEX_MAX = 256  # signed member reports carried by one vertex
REPORTS_BYTES_MAX = MIB // 4  # of those together, so that a proposal fits a control frame; a join is ~7 kB
REPORT_BYTES_MAX = MIB // 8  # of one: what was caught holds two answers, and each may list a thousand contributors
OPENED_BYTES_MAX = MIB // 64  # of a statement that is remembered as opened: 2048 of those are 32 MiB
WORDS_MAX = 200  # characters of a reason that somebody gives
ADDRESSES_MAX = 8  # multiaddrs announced by one peer
ADDRESS_BYTES_MAX = 256  # one multiaddr
CLOCK_BOUND_S = 0.250  # beyond this offset from run time a peer is told so and owns nothing
TICKET_CHARACTERS_MAX = 600  # fits a QR code that a phone reads from a terminal
