/* NCCL's calls that a broadcast needs, over loopback sockets and host memory, with NCCL's own signatures: groups are joined
 * and broadcasts run beside the caller, a lost peer is an error that ncclCommGetAsyncError tells, an abort ends what waits.
 * A unique id holds the port where rank 0 listens. Checks what a caller may get wrong: rank, size, order. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
typedef struct { char internal[128]; } UniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config;
typedef struct {
  int size, rank, port, listener, sockets[16];
  volatile int state, aborted;
  char *data;
  size_t count;
  pthread_t thread;
  int running;
} Comm;

static int listeners[65536];

static int move(Comm *comm, int socket, char *data, size_t count, int out) {
  while (count) {
    struct pollfd wait = {socket, out ? POLLOUT : POLLIN, 0};
    if (comm->aborted) return -1;
    if (poll(&wait, 1, 20) <= 0) continue;
    ssize_t n = out ? send(socket, data, count, MSG_NOSIGNAL | MSG_DONTWAIT) : recv(socket, data, count, MSG_DONTWAIT);
    if (n < 0 && errno == EAGAIN) continue;
    if (n <= 0) return -1;
    data += n;
    count -= n;
  }
  return 0;
}

static void *join(void *argument) {
  Comm *comm = argument;
  if (comm->rank == 0) {
    for (int missing = comm->size - 1; missing && !comm->aborted;) {
      struct pollfd wait = {comm->listener, POLLIN, 0};
      if (poll(&wait, 1, 20) <= 0) continue;
      int rank, socket = accept(comm->listener, 0, 0);
      if (move(comm, socket, (char *)&rank, sizeof rank, 0) || rank < 1 || rank >= comm->size || comm->sockets[rank] >= 0) {
        comm->state = INVALID_USAGE;
        return 0;
      }
      comm->sockets[rank] = socket;
      missing--;
    }
    int go = comm->size;
    for (int rank = 1; rank < comm->size && !comm->aborted; rank++) move(comm, comm->sockets[rank], (char *)&go, sizeof go, 1);
  } else {
    struct sockaddr_in address = {AF_INET, htons(comm->port), {htonl(INADDR_LOOPBACK)}};
    int size = 0, socket_ = socket(AF_INET, SOCK_STREAM, 0);
    comm->sockets[0] = socket_;
    if (connect(socket_, (void *)&address, sizeof address) || move(comm, socket_, (char *)&comm->rank, sizeof comm->rank, 1) ||
        move(comm, socket_, (char *)&size, sizeof size, 0) || size != comm->size) {
      comm->state = size && size != comm->size ? INVALID_USAGE : REMOTE_ERROR;
      return 0;
    }
  }
  comm->state = SUCCESS;
  return 0;
}

static void *broadcast(void *argument) {
  Comm *comm = argument;
  size_t count = comm->count;
  int failed = 0;
  if (comm->rank == 0) {
    for (int rank = 1; rank < comm->size && !failed; rank++) {
      failed = move(comm, comm->sockets[rank], (char *)&count, sizeof count, 1) ||
               move(comm, comm->sockets[rank], comm->data, count, 1);
    }
  } else {
    failed = move(comm, comm->sockets[0], (char *)&count, sizeof count, 0) || count != comm->count ||
             move(comm, comm->sockets[0], comm->data, count, 0);
  }
  comm->state = failed ? REMOTE_ERROR : SUCCESS;
  return 0;
}

static void start(Comm *comm, void *(*work)(void *)) {
  if (comm->running) pthread_join(comm->thread, 0);
  comm->state = IN_PROGRESS;
  comm->running = 1;
  pthread_create(&comm->thread, 0, work, comm);
}

int ncclGetVersion(int *version) {
  *version = 22907;
  return SUCCESS;
}

const char *ncclGetErrorString(int code) {
  return code == REMOTE_ERROR ? "remote process exited or there was a network error" : "invalid usage";
}

int ncclGetUniqueId(UniqueId *id) {
  struct sockaddr_in address = {AF_INET, 0, {htonl(INADDR_LOOPBACK)}};
  socklen_t length = sizeof address;
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  bind(listener, (void *)&address, length);
  listen(listener, 16);
  getsockname(listener, (void *)&address, &length);
  int port = ntohs(address.sin_port);
  listeners[port] = listener;
  memset(id, 7, sizeof *id);
  memcpy(id->internal + 100, &port, sizeof port);
  return SUCCESS;
}

int ncclCommInitRankConfig(Comm **out, int size, UniqueId id, int rank, Config *config) {
  if (config->magic != 0xcafebeef || config->size < sizeof *config || config->version < 21400 || config->blocking) return INVALID_ARGUMENT;
  if (rank < 0 || rank >= size || size > 16) return INVALID_ARGUMENT;
  Comm *comm = calloc(1, sizeof *comm);
  comm->size = size;
  comm->rank = rank;
  memcpy(&comm->port, id.internal + 100, sizeof comm->port);
  comm->listener = listeners[comm->port & 65535];
  memset(comm->sockets, -1, sizeof comm->sockets);
  start(comm, join);
  *out = comm;
  return IN_PROGRESS;
}

int ncclCommGetAsyncError(Comm *comm, int *state) {
  *state = comm->state;
  return SUCCESS;
}

int ncclBroadcast(char *from, char *to, size_t count, int type, int root, Comm *comm, void *stream) {
  if (from != to || type != 1 || root != 0) return INVALID_ARGUMENT;
  if (comm->state != SUCCESS) return INVALID_USAGE; /* the last call has not gone through */
  comm->data = to;
  comm->count = count;
  start(comm, broadcast);
  return IN_PROGRESS;
}

int ncclCommAbort(Comm *comm) {
  comm->aborted = 1;
  pthread_join(comm->thread, 0);
  if (comm->rank == 0) close(comm->listener);
  for (int rank = 0; rank < 16; rank++)
    if (comm->sockets[rank] >= 0) close(comm->sockets[rank]);
  free(comm);
  return SUCCESS;
}
