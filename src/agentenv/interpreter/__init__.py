"""The code interpreter of template `code-interpreter-v1` (contract section 4): a small HTTP server that runs inside a guest.

    python3 -c ... server        HTTP on port 49999; owns the contexts, runs nothing of a user's
      └─ spawner                 has IPython, pandas and matplotlib imported; every worker is its child
           ├─ worker (Python)    a fork of the spawner: a context is there in milliseconds
           ├─ worker (node)      `javascript_worker.js`
           └─ worker (bash)      `bash_worker.sh`

A worker runs the cells of one context, one after the other. Server and worker are joined by four pipes: requests (the
worker's fd 3), events (fd 4), and its stdout and stderr. One request or event is one line of ASCII JSON.

This package is copied into the guest as it is and uses Debian's Python 3.11, tornado and IPython there. It knows nothing of
the rest of the product, and the rest never imports it.
"""
