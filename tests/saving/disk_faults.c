/* Loaded before libc (LD_PRELOAD): numbers the calls that change files below a folder, and lets one of them go wrong.

   Native code is seen as Python is, but for a rename by safetensors, which asks the kernel itself. Writes that would
   escape, libc's own and those to mapped pages, show in `disk_bytes`: it is compared with what lies on disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL, HALF, FULL, BROKEN, ONCE };       /* as in disk_faults.py */
enum { FDS = 1 << 16, BELOW = 1, WRITTEN = 2 };

static char folder[4096];
static char names[1 << 20];
static char kept[FDS];                                /* of a descriptor: is it below the folder, is it written to */
static int armed, mode, error_number;
static long target, calls, bytes;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void disk_arm(const char *path, int how, long number, int code) {
    snprintf(folder, sizeof folder, "%s", path);
    memset(kept, 0, sizeof kept);
    names[0] = 0;
    mode = how, target = number, error_number = code, calls = bytes = 0;
    __atomic_store_n(&armed, 1, __ATOMIC_SEQ_CST);
}

long disk_disarm(void) {
    armed = 0;
    return calls;
}

long disk_bytes(void) { return bytes; }

const char *disk_names(void) { return names; }

static int below(const char *path) {
    size_t length = strlen(folder);
    return path && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int watched_at(int at, const char *path) {
    if (!armed || !path) return 0;
    return path[0] == '/' ? below(path) : at >= 0 && at < FDS && kept[at];
}

static int watched_fd(int fd) { return armed && fd >= 0 && fd < FDS && kept[fd]; }

static const char *name_of(int fd) {
    static __thread char path[4096];
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return path;
}

/* The next call: 0 where it goes well; else errno is set. Of a disk that is full what frees room goes well. */
static int refused(const char *name, const char *path, int frees) {
    long number = __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST);
    size_t used = strlen(names);
    const char *last = path ? strrchr(path, '/') : NULL;
    snprintf(names + used, sizeof names - used, "%s %s\n", name, last ? last + 1 : path ? path : "");
    if (mode == KILL && number == target) kill(getpid(), SIGKILL);
    if ((mode == FULL && number >= target && !frees) || (mode == BROKEN && number >= target) ||
        (mode == ONCE && number == target)) {
        errno = error_number;
        return 1;
    }
    return 0;
}

/* How many bytes of the next write reach the file. */
static ssize_t allowed(const char *name, int fd, size_t size) {
    int here = calls == target;
    if (here && size > 1 && (mode == FULL || mode == HALF)) {
        int how = mode;
        mode = COUNT;
        refused(name, name_of(fd), 0);
        mode = how;
        return (ssize_t)(size / 2);
    }
    return refused(name, name_of(fd), 0) ? -1 : (ssize_t)size;
}

static ssize_t written(ssize_t size) {
    if (size > 0) __atomic_fetch_add(&bytes, size, __ATOMIC_SEQ_CST);
    if (mode == HALF && calls == target + 1) kill(getpid(), SIGKILL);
    return size;
}

static int opened(int fd, int at, const char *path, int flags) {
    if (fd >= 0 && fd < FDS) kept[fd] = !watched_at(at, path) ? 0 : flags & (O_WRONLY | O_RDWR) ? BELOW | WRITTEN : BELOW;
    return fd;
}

static int open_refused(int at, const char *path, int flags) {
    return flags & (O_WRONLY | O_RDWR | O_CREAT) && watched_at(at, path) && refused("open", path, !(flags & O_CREAT));
}

#define MODE_OF(flags)                         \
    mode_t permissions = 0;                    \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {   \
        va_list rest;                          \
        va_start(rest, flags);                 \
        permissions = va_arg(rest, mode_t);    \
        va_end(rest);                          \
    }

#define OPEN(name)                                                                          \
    int name(const char *path, int flags, ...) {                                            \
        MODE_OF(flags)                                                                      \
        if (open_refused(AT_FDCWD, path, flags)) return -1;                                 \
        return opened(REAL(name)(path, flags, permissions), AT_FDCWD, path, flags);         \
    }
#define OPENAT(name)                                                                        \
    int name(int at, const char *path, int flags, ...) {                                    \
        MODE_OF(flags)                                                                      \
        if (open_refused(at, path, flags)) return -1;                                       \
        return opened(REAL(name)(at, path, flags, permissions), at, path, flags);           \
    }
#define FOPEN(name)                                                                         \
    FILE *name(const char *path, const char *how) {                                         \
        int flags = strpbrk(how, "wa+") ? O_WRONLY | O_CREAT : O_RDONLY;                    \
        return open_refused(AT_FDCWD, path, flags) ? NULL : REAL(name)(path, how);          \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)

int close(int fd) {
    int refuse = watched_fd(fd) && kept[fd] & WRITTEN && refused("close", name_of(fd), 0), code = errno;
    if (fd >= 0 && fd < FDS) kept[fd] = 0;
    int result = REAL(close)(fd);
    if (!refuse) return result;
    errno = code;
    return -1;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!watched_fd(fd)) return REAL(write)(fd, data, size);
    ssize_t part = allowed("write", fd, size);
    return part < 0 ? -1 : written(REAL(write)(fd, data, (size_t)part));
}

#define PWRITE(name, offset_t)                                                              \
    ssize_t name(int fd, const void *data, size_t size, offset_t offset) {                  \
        if (!watched_fd(fd)) return REAL(name)(fd, data, size, offset);                     \
        ssize_t part = allowed("pwrite", fd, size);                                             \
        return part < 0 ? -1 : written(REAL(name)(fd, data, (size_t)part, offset));         \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (!watched_fd(fd)) return REAL(writev)(fd, parts, count);
    ssize_t part = allowed("writev", fd, parts[0].iov_len);
    if (part < 0) return -1;
    if ((size_t)part < parts[0].iov_len) return written(REAL(write)(fd, parts[0].iov_base, (size_t)part));
    return written(REAL(writev)(fd, parts, count));
}

#define ON_FD(name, declared, ...)                                                          \
    int name declared {                                                                     \
        return watched_fd(fd) && refused(#name, name_of(fd), 0) ? -1 : REAL(name)(__VA_ARGS__);    \
    }
ON_FD(fsync, (int fd), fd)
ON_FD(fdatasync, (int fd), fd)
ON_FD(ftruncate, (int fd, off_t size), fd, size)
ON_FD(ftruncate64, (int fd, off64_t size), fd, size)
ON_FD(fallocate, (int fd, int how, off_t offset, off_t size), fd, how, offset, size)
ON_FD(fallocate64, (int fd, int how, off64_t offset, off64_t size), fd, how, offset, size)

#define ON_PATH(name, frees, declared, at, path, ...)                                       \
    int name declared {                                                                     \
        return watched_at(at, path) && refused(#name, path, frees) ? -1 : REAL(name)(__VA_ARGS__); \
    }
ON_PATH(rename, 0, (const char *from, const char *to), AT_FDCWD, to, from, to)
ON_PATH(renameat, 0, (int in, const char *from, int at, const char *to), at, to, in, from, at, to)
ON_PATH(renameat2, 0, (int in, const char *from, int at, const char *to, unsigned flags), at, to, in, from, at, to, flags)
ON_PATH(link, 0, (const char *from, const char *to), AT_FDCWD, to, from, to)
ON_PATH(linkat, 0, (int in, const char *from, int at, const char *to, int flags), at, to, in, from, at, to, flags)
ON_PATH(symlink, 0, (const char *from, const char *to), AT_FDCWD, to, from, to)
ON_PATH(mkdir, 0, (const char *path, mode_t permissions), AT_FDCWD, path, path, permissions)
ON_PATH(mkdirat, 0, (int at, const char *path, mode_t permissions), at, path, at, path, permissions)
ON_PATH(truncate, 0, (const char *path, off_t size), AT_FDCWD, path, path, size)
ON_PATH(unlink, 1, (const char *path), AT_FDCWD, path, path)
ON_PATH(unlinkat, 1, (int at, const char *path, int flags), at, path, at, path, flags)
ON_PATH(rmdir, 1, (const char *path), AT_FDCWD, path, path)
ON_PATH(remove, 1, (const char *path), AT_FDCWD, path, path)
ON_PATH(utimensat, 0, (int at, const char *path, const struct timespec times[2], int flags), at, path, at, path, times, flags)
