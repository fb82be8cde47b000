"""Replay audit: check that a trainer took its assigned steps.

A round is cut into short segments. The trainer commits to a hash chain over its whole state at every boundary
between them. When the commitment is fixed, one segment is drawn. An auditor repeats its steps from the committed
state, with the data that the plan assigned. The next link of the chain must name the result.

    policy       drawn trainers and auditors, and the cost of a verdict
    machine      one peer's part in the audits of a run
    state_chain  the committed chain, and its trainer's record, which keeps few states and shows any
    exhibit      the blob that a trainer shows to its auditors
    binding      whether the trainer's commitment fixes an exhibit
    replay       the assignment, a trainer's state and its digest, and the steps
    judge        one audit and its verdict
    tolerance    auditable runs, their tolerance, and when bits are compared
    worker, trainer, replay_judge   the same on real tensors, in the worker, the trainer process and offline

Commitments, requests, comparisons and the blind spots of audits: specs/audit.md.
"""
