"""Replay audit: did a trainer take the steps that it was assigned?

A round is cut into short segments. The trainer commits to a hash chain over its whole state at every boundary
between them. When the commitment is fixed, one segment is drawn. An auditor repeats its steps from the committed
state, with the data that the plan assigned. The result must be what the next link of the chain names.

    policy       who is audited, by whom, and what a verdict costs
    machine      one peer's part in the audits of a run
    state_chain  what is committed, and how a trainer that kept few states shows any of them
    exhibit      what a trainer lays out for its auditors, and whether it is what the trainer committed to
    replay       the assignment, a trainer's state and its digest, and the steps
    judge        one audit and its verdict
    tolerance    what can be audited, how closely, and where bits are compared
    worker, trainer, replay_judge   the same on real tensors, in the worker, the trainer process and offline

What is committed, requested, compared, and what an audit cannot see: specs/audit.md.
"""
