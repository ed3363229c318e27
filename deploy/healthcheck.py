"""Exits with 0 if the server of this container is ready, and with 1 otherwise.

BATCHSERVE_READY_URL names another address, such as https://127.0.0.1:8000/ready with --tls-certificate. The certificate
is not checked: the server is this container's own. With --tls-client-ca this check cannot connect; turn it off then.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

URL = "http://127.0.0.1:8000/ready"
TIMEOUT_S = 4.0


def main() -> int:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # Without proxies: an HTTP_PROXY of the container would be asked otherwise.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(os.environ.get("BATCHSERVE_READY_URL", URL), timeout=TIMEOUT_S) as answer:
            print(answer.read(1000).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        print(f"{error.code}: {error.read(1000).decode(errors='replace')}")
        return 1
    except (OSError, ValueError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
