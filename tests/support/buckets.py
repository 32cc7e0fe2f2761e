"""An S3 server on loopback: moto's, spoken to by the clients of pyarrow."""

import logging
import os
from itertools import count

NUMBERS = count()


class Buckets:
    """A server that runs in a thread; its buckets are made by `make`."""

    def __init__(self):
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        _, port = self.server.get_host_and_port()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        os.environ.update(self.environment)
        import boto3

        self.client = boto3.client("s3")

    def make(self):
        """Make a bucket and return its URI."""
        name = f"bucket-{next(NUMBERS)}"
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def keys(self, uri):
        """Return the keys of a bucket below a URI, each relative to it."""
        name, _, prefix = uri.removeprefix("s3://").partition("/")
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=name, Prefix=prefix)
        found = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return [key.removeprefix(prefix).lstrip("/") for key in found]

    def content(self, uri):
        """Return what each key of a bucket holds."""
        bucket = uri.removeprefix("s3://").partition("/")[0]
        return {
            key: self.client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in self.keys(f"s3://{bucket}")
        }

    def close(self):
        self.server.stop()
        for name in self.environment:
            os.environ.pop(name, None)
