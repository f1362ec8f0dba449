/* Loaded before a server's libraries (LD_PRELOAD), it leaves TCP_NODELAY off where the server asks for it: gRPC asks for
 * every socket and has no setting against it. gRPC reads the option back, so what it reads is what it wanted.
 *
 * NAGLE_PROGRAM: of programs that have this in their name alone. NAGLE_LOG: a file that gets a byte for each socket. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_left_off(int level, int name) {
    const char *program = getenv("NAGLE_PROGRAM");
    return level == IPPROTO_TCP && name == TCP_NODELAY && (!program || strstr(program_invocation_short_name, program));
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t length) {
    if (!is_left_off(level, name)) return (int)syscall(SYS_setsockopt, fd, level, name, value, length);
    const char *path = getenv("NAGLE_LOG");
    int log = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (log >= 0 && (write(log, "1", 1) < 0 || close(log) < 0)) return -1;
    return 0;
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *length) {
    if (!is_left_off(level, name) || *length < sizeof(int))
        return (int)syscall(SYS_getsockopt, fd, level, name, value, length);
    *(int *)value = 1;
    *length = sizeof(int);
    return 0;
}
