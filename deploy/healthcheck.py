"""Exit with status 0 if the server in this container answers /health, over HTTP or (with --tls-certificate) HTTPS.

The certificate is not verified: it names the host that clients use, not 127.0.0.1.
"""

import http.client
import ssl
import sys
import urllib.request

port = sys.argv[1] if len(sys.argv) > 1 else "8000"
unverified = ssl.create_default_context()
unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
for scheme in ("http", "https"):
    try:
        urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/health", timeout=2, context=unverified)
    except (OSError, http.client.HTTPException):
        continue
    sys.exit(0)
sys.exit(1)
