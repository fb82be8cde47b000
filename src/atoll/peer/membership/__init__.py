"""Membership as one peer sees it: admission, the roster, and reports about members."""
