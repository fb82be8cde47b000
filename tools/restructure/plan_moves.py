"""File moves of the restructuring: writes moves.json from the draft, the corrections and the package roots.

Usage: python tools/restructure/plan_moves.py DRAFT.json
"""

import json
import subprocess
import sys
from pathlib import Path

# corrections to the draft: old path below src/atoll -> new path below src/atoll
CORRECTIONS = {
    "host/attach.py": "runtime/embed/run.py",
    "host/cap.py": "runtime/network/upload_limiter.py",
    "host/carriage.py": "runtime/network/bandwidth.py",
    "host/durable.py": "runtime/storage/atomic_files.py",
    "host/group_held.py": "runtime/allreduce/delta_reference.py",
    "host/island.py": "runtime/worker/training_worker.py",
    "host/judging.py": "verification/replay_audit/replay_judge.py",
    "host/learning.py": "runtime/training_spec.py",
    "host/link.py": "runtime/network/peer_link.py",
    "host/links.py": "runtime/network/connection_manager.py",
    "host/live.py": "runtime/worker/live_parameters.py",
    "host/loop_trust.py": "runtime/embed/trust_defaults.py",
    "host/mine.py": "runtime/worker/local_update.py",
    "host/names.py": "verification/sum_check/wire_digests.py",
    "host/outbox.py": "verification/update_cache.py",
    "host/ownership.py": "runtime/storage/ownership.py",
    "host/runs.py": "runtime/embed/api.py",
    "host/trainer/child.py": "runtime/trainer/process.py",
    "host/trainer/parent.py": "runtime/trainer/client.py",
    "host/trainer/words.py": "runtime/trainer/protocol.py",
    "host/tuning.py": "runtime/control/settings_change.py",
    "host/two_files.py": "runtime/storage/staged_file.py",
    "host/visitor.py": "runtime/readonly_client.py",
    "learn/answers.py": "training/exchange/reply_formats.py",
    "learn/borrowed.py": "training/exchange/user_optimizer.py",
    "learn/codec/device.py": "training/codec/compiled/device.py",
    "learn/codec/kernels.py": "training/codec/compiled/kernels.py",
    "learn/codec/native.py": "training/codec/compiled/native.py",
    "learn/codec/changed.py": "training/codec/changed_tensors.py",
    "learn/codec/places.py": "training/codec/index_coding.py",
    "learn/codec/squeeze.py": "training/codec/byte_compression.py",
    "learn/eager.py": "training/recipe/local_anchor.py",
    "learn/forecast.py": "training/experiment/cost_model.py",
    "learn/kept.py": "training/recipe/private_parameters.py",
    "learn/products.py": "training/exchange/deterministic_dot.py",
    "learn/rehearsal.py": "training/experiment/simulator.py",
    "learn/tensors.py": "training/exchange/parameter_names.py",
    "learn/villains.py": "training/experiment/adversaries.py",
    "learn/weighing.py": "training/exchange/distance_weights.py",
    "node/readers.py": "peer/membership/readers.py",
    "node/branches.py": "features/forks/detect.py",
    "node/config/about.py": "peer/config/docs.py",
    "node/config/meaning.py": "peer/config/defaults.py",
    "node/config/page.py": "peer/config/render.py",
    "node/config/sense.py": "peer/config/validate.py",
    "node/earlier.py": "peer/governance/rollback_targets.py",
    "node/exhibits.py": "verification/evidence_download.py",
    "node/kept_exhibits.py": "verification/evidence_store.py",
    "node/kept_rows.py": "features/attribution/row_archive.py",
    "node/misdeeds.py": "peer/round/misbehavior.py",
    "node/my_answers.py": "peer/round/owned_results.py",
    "node/patience.py": "peer/round/adaptive_timeout.py",
    "node/repeats.py": "peer/round/retransmission.py",
    "node/sides.py": "features/forks/poll.py",
    "node/tuning.py": "peer/governance/settings_change.py",
    "node/words.py": "peer/membership/report_broadcaster.py",
    "policy/inquiry.py": "verification/case.py",
    "policy/room.py": "policy/vertex_capacity.py",
    "protocol/consensus/said.py": "protocol/agreement/voter_state.py",
    "protocol/consensus/snow.py": "features/forks/snowball.py",
    "protocol/reduce/hearsay.py": "protocol/allreduce/result_recovery.py",
    "sim/gang.py": "simulation/adversaries/colluding_poisoners.py",
    "sim/influence.py": "simulation/adversaries/influence_bound.py",
    "sim/keepers.py": "simulation/adversaries/proposer_grinding.py",
    "sim/owners.py": "simulation/adversaries/lying_owners.py",
    "sim/peekers.py": "simulation/adversaries/commit_after_peek.py",
    "sim/records.py": "simulation/adversaries/low_reputation.py",
    "sim/strangers.py": "simulation/adversaries/strangers.py",
    "sim/villains.py": "simulation/adversaries/byzantine.py",
    "sim/apart.py": "simulation/partition_training.py",
    "sim/audits.py": "simulation/replay_audits.py",
    "sim/chains.py": "simulation/simulated_audit_chain.py",
    "sim/checkers.py": "simulation/invariants.py",
    "sim/island.py": "simulation/worker.py",
    "sim/named.py": "simulation/symbolic_openings.py",
    "sim/openings.py": "simulation/sum_check.py",
    "sim/scores.py": "simulation/loss_scoring.py",
    "sim/twins.py": "simulation/redundant_training.py",
    "sim/scenarios/apart.py": "simulation/scenarios/partition_training.py",
    "sim/scenarios/audits.py": "simulation/scenarios/replay_audits.py",
    "sim/scenarios/branches.py": "simulation/scenarios/forks.py",
    "sim/scenarios/clients.py": "simulation/scenarios/sampled_members.py",
    "sim/scenarios/liars.py": "simulation/scenarios/byzantine.py",
    "sim/scenarios/night.py": "simulation/scenarios/random_campaign.py",
    "sim/scenarios/oceans.py": "simulation/scenarios/wide_area.py",
    "sim/scenarios/openings.py": "simulation/scenarios/sum_check.py",
    "sim/scenarios/orphans.py": "simulation/scenarios/all_owners_lost.py",
    "sim/scenarios/owners.py": "simulation/scenarios/lying_owners.py",
    "sim/scenarios/pieces.py": "simulation/scenarios/archive.py",
    "sim/scenarios/poisoners.py": "simulation/scenarios/colluding_poisoners.py",
    "sim/scenarios/scores.py": "simulation/scenarios/loss_scoring.py",
    "sim/scenarios/siege.py": "simulation/scenarios/mixed_byzantine.py",
    "sim/scenarios/slow.py": "simulation/scenarios/slow_links.py",
    "sim/scenarios/stage.py": "simulation/scenarios/harness.py",
    "sim/scenarios/stories.py": "simulation/scenarios/basic.py",
    "sim/scenarios/twins.py": "simulation/scenarios/redundant_training.py",
    "sim/scenarios/validation.py": "simulation/scenarios/state_validation.py",
}
# every file that neither table names keeps its place below the new root of its package
PACKAGES = {
    "host": "runtime",
    "keys": "crypto",
    "learn/aggregate": "training/robust",
    "learn/audit": "verification/replay_audit",
    "learn": "training",
    "node": "peer",
    "protocol/consensus": "protocol/agreement",
    "protocol/dag": "protocol/history",
    "protocol/reduce": "protocol/allreduce",
    "sim": "simulation",
}
TESTS = {"keys": "crypto", "learn": "training", "node": "peer", "host": "runtime", "sim": "simulation"}


def below(path: str, roots: dict[str, str]) -> str:
    """The path below its new root; the longest old root wins."""
    for old in sorted(roots, key=len, reverse=True):
        if path.startswith(old + "/"):
            return roots[old] + path[len(old) :]
    return path


def main() -> None:
    draft = {
        old.removeprefix("src/atoll/"): new.removeprefix("src/atoll/")
        for old, new in json.loads(Path(sys.argv[1]).read_text())["move"].items()
    }
    listed = subprocess.run(["git", "ls-files", "src/atoll", "tests"], capture_output=True, text=True, check=True)
    moves = {}
    for path in listed.stdout.split():
        if path.startswith("src/atoll/"):
            short = path.removeprefix("src/atoll/")
            new = "src/atoll/" + (CORRECTIONS.get(short) or draft.get(short) or below(short, PACKAGES))
        else:
            new = "tests/" + below(path.removeprefix("tests/"), TESTS)
        if new != path:
            moves[path] = new
    assert len(set(moves.values())) == len(moves), "two files for one place"
    out = Path(__file__).with_name("moves.json")
    out.write_text(json.dumps(moves, indent=1, sort_keys=True) + "\n")
    folders: dict[str, int] = {}
    for path in listed.stdout.split():
        folder = str(Path(moves.get(path, path)).parent)
        folders[folder] = folders.get(folder, 0) + 1
    for folder, count in sorted(folders.items(), key=lambda kv: -kv[1])[:14]:
        print(count, folder)
    print(len(moves), "moves")


main()
