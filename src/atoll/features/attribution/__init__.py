"""Attribution: how much each contributor changed a round, and the round without one of them."""
