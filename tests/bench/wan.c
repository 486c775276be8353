/* A wide area path between two network namespaces: one TUN device in each, this process forwards between them.
 *
 *   wan PID_A PID_B DELAY_MS RATE_MBIT LOSS QUEUE_MS
 *
 * PID_x is a process in the namespace. Each direction has its own thread, rate, queue and delay; LOSS is the share
 * of packets that is dropped, drawn from a generator with a fixed seed. Prints "up" once both devices ("wan0") are
 * there; ends when its standard input does.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define SLOTS (1u << 15)
#define LARGEST 1600

struct packet {
    double due;
    uint32_t length;
    unsigned char content[LARGEST];
};

struct direction {
    int from, to;
    double delay, bytes_per_second, loss, queue;
    uint64_t draw;
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static double uniform(uint64_t *state) { /* xorshift64* */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return ((*state * 2685821657736338717ull) >> 11) * 0x1p-53;
}

static void *forward(void *argument) {
    struct direction *way = argument;
    struct packet *ring = malloc(sizeof(struct packet) * SLOTS);
    uint32_t head = 0, tail = 0; /* head - tail packets are on their way */
    double free_at = 0;          /* when the bottleneck has sent what it was given */
    if (!ring) exit(1);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    for (;;) {
        struct pollfd waiting = {.fd = way->from, .events = POLLIN};
        struct timespec pause = {1, 0};
        if (head != tail) {
            double left = ring[tail % SLOTS].due - now();
            if (left < 0) left = 0;
            pause.tv_sec = (time_t)left;
            pause.tv_nsec = (long)((left - pause.tv_sec) * 1e9);
        }
        ppoll(&waiting, 1, &pause, NULL);
        double time = now();
        while (head != tail && ring[tail % SLOTS].due <= time) {
            struct packet *next = &ring[tail++ % SLOTS];
            ssize_t sent = write(way->to, next->content, next->length);
            (void)sent; /* a full device drops it, as a router would */
        }
        for (int count = 0; count < 64; count++) {
            unsigned char spare[LARGEST];
            int full = head - tail == SLOTS;
            struct packet *next = &ring[head % SLOTS];
            ssize_t length = read(way->from, full ? spare : next->content, LARGEST);
            if (length <= 0) break;
            if (full || uniform(&way->draw) < way->loss) continue;
            if (free_at < time) free_at = time;
            if (free_at - time > way->queue) continue;
            free_at += length / way->bytes_per_second;
            next->due = free_at + way->delay;
            next->length = (uint32_t)length;
            head++;
        }
    }
    return NULL;
}

static int space_of(const char *pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/ns/net", pid);
    int space = open(path, O_RDONLY);
    if (space < 0) {
        perror(path);
        exit(1);
    }
    return space;
}

static void enter(int space) {
    if (setns(space, CLONE_NEWNET) != 0) {
        perror("setns");
        exit(1);
    }
}

static int device_in(const char *pid, int home) {
    enter(space_of(pid));
    struct ifreq wanted = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    strcpy(wanted.ifr_name, "wan0");
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (device < 0 || ioctl(device, TUNSETIFF, &wanted) != 0) {
        perror("/dev/net/tun");
        exit(1);
    }
    enter(home);
    return device;
}

int main(int count, char **arguments) {
    if (count != 7) return 2;
    int home = space_of("self");
    int first = device_in(arguments[1], home), second = device_in(arguments[2], home);
    double delay = atof(arguments[3]) / 1e3, rate = atof(arguments[4]) * 1e6 / 8;
    double loss = atof(arguments[5]), queue = atof(arguments[6]) / 1e3;
    struct direction ways[2] = {
        {first, second, delay, rate, loss, queue, 88172645463325252ull},
        {second, first, delay, rate, loss, queue, 1181783497276652981ull},
    };
    pthread_t threads[2];
    for (int index = 0; index < 2; index++)
        if (pthread_create(&threads[index], NULL, forward, &ways[index]) != 0) return 1;
    puts("up");
    fflush(stdout);
    char rest[16];
    while (read(0, rest, sizeof rest) > 0) {
    }
    return 0;
}
