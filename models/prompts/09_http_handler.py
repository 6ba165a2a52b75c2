"""A small HTTP server that stores JSON documents in memory."""

import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlparse

documents = {}


class DocumentHandler(BaseHTTPRequestHandler):
    server_version = "DocumentServer/1.0"

    def send_json(self, value, status=HTTPStatus.OK):
        body = json.dumps(value).encode("utf-8")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def read_json(self):
        length = int(self.headers.get("Content-Length", 0))
        return json.loads(self.rfile.read(length))

    def do_GET(self):
        url = urlparse(self.path)
        query = parse_qs(url.query)
        name = url.path.strip("/")
        if not name:
            self.send_json(sorted(documents))
        elif name in documents:
            self.send_json(documents[name])
        else:
            self.send_json({"error": "not found"}, HTTPStatus.NOT_FOUND)

    def do_PUT(self):