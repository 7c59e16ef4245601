"""terminado as its documentation serves it: a shell of its own for each connection, in clear. Says its port first."""

import sys

import tornado.httpserver
import tornado.ioloop
import tornado.netutil
import tornado.web
from terminado import TermSocket, UniqueTermManager

manager = UniqueTermManager(shell_command=sys.argv[1:])
application = tornado.web.Application([(r"/shell", TermSocket, {"term_manager": manager})])
sockets = tornado.netutil.bind_sockets(0, "127.0.0.1")
tornado.httpserver.HTTPServer(application).add_sockets(sockets)
print(sockets[0].getsockname()[1], flush=True)
tornado.ioloop.IOLoop.current().start()
