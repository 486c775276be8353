/* An internet of point-to-point lines: one TUN device ("wan0") in each network namespace, this process carries between them.
 *
 * Commands come as lines on standard input, and each is answered by "ok" or by what is wrong:
 *
 *   device NAME PID                      a device in the namespace of the process PID
 *   line NAME DELAY_MS UP DOWN QUEUE_MS LOSS
 *                                        its line: the delay is added each way, Mbit/s out and in (0: no limit), and the share of
 *                                        packets that it drops each way, drawn from a generator with a fixed seed
 *   route ADDRESS NAME                   packets for ADDRESS (IPv4 or IPv6) go to that device from now on
 *   forget ADDRESS                       to nobody
 *   cut NAME, join NAME                  nothing passes its line; it does again
 *
 * Packets to unknown addresses vanish without a word, as they mostly do out there. Ends when its input does.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define DEVICES 64
#define ROUTES 512
#define PACKETS 65536
#define LARGEST 1600

struct device {
    char name[24];
    int fd, cut;
    double delay, up, down, queue, loss; /* up and down: bytes a second */
    double sends_at, receives_at; /* when its line has carried what it was given, out and in */
};
struct route {
    unsigned char address[16];
    int length, device;
};
struct packet {
    double due;
    uint64_t number;
    int to, length;
    unsigned char content[LARGEST];
};

static struct device devices[DEVICES];
static int device_count;
static struct route routes[ROUTES];
static int route_count;
static struct packet *heap[PACKETS], *spare[PACKETS];
static int under_way, spares;
static uint64_t number;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static int before(const struct packet *one, const struct packet *other) {
    return one->due < other->due || (one->due == other->due && one->number < other->number);
}

static void push(struct packet *packet) {
    int at = under_way++;
    for (; at && before(packet, heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = packet;
}

static struct packet *pop(void) {
    struct packet *first = heap[0], *last = heap[--under_way];
    int at = 0;
    for (int child; (child = 2 * at + 1) < under_way; at = child) {
        if (child + 1 < under_way && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], last)) break;
        heap[at] = heap[child];
    }
    heap[at] = last;
    return first;
}

/* When a way of `rate` bytes a second that is given `length` bytes at `time` has carried them; negative if its queue is full. */
static double carried(double rate, double queue, double *free_at, double time, int length) {
    if (rate == 0) return time;
    if (*free_at < time) *free_at = time;
    if (*free_at - time > queue) return -1;
    return *free_at += length / rate;
}

static double uniform(void) { /* xorshift64* */
    static uint64_t state = 88172645463325252ull;
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return ((state * 2685821657736338717ull) >> 11) * 0x1p-53;
}

static struct route *find(const unsigned char *address, int length) {
    for (int i = 0; i < route_count; i++)
        if (routes[i].length == length && memcmp(routes[i].address, address, length) == 0) return &routes[i];
    return NULL;
}

static void take(struct device *from, double time) {
    for (int count = 0; count < 64; count++) {
        struct packet *next = spares ? spare[spares - 1] : NULL;
        unsigned char lost[LARGEST];
        unsigned char *content = next ? next->content : lost;
        int length = (int)read(from->fd, content, LARGEST);
        if (length <= 0) return;
        if (!next || from->cut) continue;
        struct route *route = content[0] >> 4 == 4 && length >= 20   ? find(content + 16, 4)
                              : content[0] >> 4 == 6 && length >= 40 ? find(content + 24, 16)
                                                                     : NULL;
        if (!route || devices[route->device].cut) continue;
        struct device *to = &devices[route->device];
        if (uniform() < from->loss + to->loss) continue;
        double at = carried(from->up, from->queue, &from->sends_at, time, length);
        if (at >= 0) at = carried(to->down, to->queue, &to->receives_at, at + from->delay + to->delay, length);
        if (at < 0) continue;
        next->due = at;
        next->number = number++;
        next->to = route->device;
        next->length = length;
        spares--;
        push(next);
    }
}

static int space_of(const char *pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/ns/net", pid);
    return open(path, O_RDONLY | O_CLOEXEC);
}

static const char *add_device(const char *name, const char *pid) {
    if (device_count == DEVICES) return "no more devices";
    int home = space_of("self"), there = space_of(pid);
    if (there < 0 || setns(there, CLONE_NEWNET) != 0) return strerror(errno);
    struct ifreq wanted = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(wanted.ifr_name, "wan0");
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    const char *wrong = fd < 0 || ioctl(fd, TUNSETIFF, &wanted) != 0 ? strerror(errno) : NULL;
    if (setns(home, CLONE_NEWNET) != 0) exit(1);
    close(home);
    close(there);
    if (wrong) return wrong;
    struct device *found = &devices[device_count++];
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "%s", name);
    found->fd = fd;
    return NULL;
}

static struct device *named(const char *name) {
    for (int i = 0; i < device_count; i++)
        if (strcmp(devices[i].name, name) == 0) return &devices[i];
    return NULL;
}

static const char *set_route(const char *text, const struct device *to) {
    unsigned char address[16] = {0};
    int length = strchr(text, ':') ? 16 : 4;
    if (inet_pton(length == 16 ? AF_INET6 : AF_INET, text, address) != 1) return "not an address";
    struct route *route = find(address, length);
    if (!to) {
        if (route) *route = routes[--route_count];
        return NULL;
    }
    if (!route && route_count == ROUTES) return "no more routes";
    if (!route) route = &routes[route_count++];
    memcpy(route->address, address, 16);
    route->length = length;
    route->device = (int)(to - devices);
    return NULL;
}

static const char *obey(char *line) {
    char what[16] = "", one[64] = "", two[64] = "";
    double delay, up, down, queue, loss;
    sscanf(line, "%15s %63s %63s", what, one, two);
    if (strcmp(what, "device") == 0) return add_device(one, two);
    if (strcmp(what, "forget") == 0) return set_route(one, NULL);
    struct device *device = named(strcmp(what, "route") == 0 ? two : one);
    if (!device) return "no such device";
    if (strcmp(what, "route") == 0) return set_route(one, device);
    if (strcmp(what, "cut") == 0 || strcmp(what, "join") == 0) {
        device->cut = what[0] == 'c';
        return NULL;
    }
    if (strcmp(what, "line") != 0 || sscanf(line, "%*s %*s %lf %lf %lf %lf %lf", &delay, &up, &down, &queue, &loss) != 5)
        return "not a command";
    device->delay = delay / 1e3;
    device->up = up * 1e6 / 8;
    device->down = down * 1e6 / 8;
    device->queue = queue / 1e3;
    device->loss = loss;
    return NULL;
}

/* Obey what has come; 0 at the end of the input. */
static int hear(void) {
    static char text[4096];
    static int length;
    int more = (int)read(0, text + length, sizeof text - length);
    if (more <= 0) return 0;
    length += more;
    for (char *end; (end = memchr(text, '\n', length));) {
        *end = 0;
        const char *wrong = obey(text);
        puts(wrong ? wrong : "ok");
        length -= (int)(end + 1 - text);
        memmove(text, end + 1, length);
    }
    fflush(stdout);
    return length < (int)sizeof text;
}

int main(void) {
    struct packet *memory = malloc(sizeof(struct packet) * PACKETS);
    if (!memory) return 1;
    for (spares = 0; spares < PACKETS; spares++) spare[spares] = &memory[spares];
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    for (;;) {
        struct pollfd waiting[DEVICES + 1] = {{.fd = 0, .events = POLLIN}};
        for (int i = 0; i < device_count; i++) waiting[i + 1] = (struct pollfd){.fd = devices[i].fd, .events = POLLIN};
        struct timespec pause = {1, 0};
        if (under_way) {
            double left = heap[0]->due - now();
            if (left < 0) left = 0;
            if (left < 1) pause = (struct timespec){0, (long)(left * 1e9)};
        }
        int count = device_count;
        ppoll(waiting, count + 1, &pause, NULL);
        double time = now();
        for (int i = 0; i < count; i++)
            if (waiting[i + 1].revents) take(&devices[i], time);
        while (under_way && heap[0]->due <= time) {
            struct packet *next = pop();
            if (!devices[next->to].cut) {
                ssize_t sent = write(devices[next->to].fd, next->content, next->length);
                (void)sent; /* a full device, or one that is down, drops it */
            }
            spare[spares++] = next;
        }
        if (waiting[0].revents && !hear()) return 0;
    }
}
