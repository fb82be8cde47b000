"""Optional checks of members' work. Each check is one folder."""
