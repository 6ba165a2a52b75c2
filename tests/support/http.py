"""httpx2 requests that share one TLS context: creating a context reads all certificates, which takes 40 ms."""

from __future__ import annotations

import ssl
from functools import partial

import httpx2

TLS = ssl.create_default_context()
get, head, options, post, stream = (
    partial(method, verify=TLS) for method in (httpx2.get, httpx2.head, httpx2.options, httpx2.post, httpx2.stream)
)
