"""The rules for DNS labels, which the names of pods have to keep because they become host names."""

from __future__ import annotations

import re

LONGEST = 63
"""Characters of a DNS label: pod names become host names, and Services need one (RFC 1123, RFC 1035)."""
RFC_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
