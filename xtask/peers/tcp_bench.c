/* The raw side of TCP rows of `cargo xtask bench-peers`: plain sockets, one test, one line of JSON.
 *
 *     tcp_bench server PORT
 *     tcp_bench latency|asleep|bandwidth|rate SIZE ITERATIONS HOST PORT
 *
 * latency    each message answered by one of its size; half the time there and back: the median and
 *            the mean, in microseconds.
 * asleep     the same, by sockets that block; all others are polled.
 * bandwidth  messages back to back, one call each, then one answer.
 * rate       the same; the other figure of the two is meant.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct test {
    uint64_t answers, blocks, size, iterations;
};

static void check(int ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "tcp_bench: %s: %s\n", what, strerror(errno));
        exit(2);
    }
}

static void move(int socket, char *bytes, size_t size, int sends)
{
    while (size > 0) {
        ssize_t moved =
            sends ? send(socket, bytes, size, MSG_NOSIGNAL) : recv(socket, bytes, size, 0);
        check(moved > 0 || (moved < 0 && errno == EAGAIN), sends ? "send" : "recv");
        if (moved > 0)
            bytes += moved, size -= (size_t)moved;
    }
}

static void tune(int socket, int blocks)
{
    int one = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    check(fcntl(socket, F_SETFL, blocks ? 0 : O_NONBLOCK) == 0, "fcntl");
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static int by_size(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static void serve(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 1) == 0, "listen");
    int peer = accept(listener, NULL, NULL);
    check(peer >= 0, "accept");
    struct test test;
    move(peer, (char *)&test, sizeof test, 0);
    tune(peer, test.blocks != 0);
    char *bytes = malloc(test.size);
    for (uint64_t at = 0; at < test.iterations; at++) {
        move(peer, bytes, test.size, 0);
        if (test.answers)
            move(peer, bytes, test.size, 1);
    }
    move(peer, "!", 1, 1);
    recv(peer, bytes, 1, MSG_WAITALL); /* until the client has gone */
}

int main(int count, char **words)
{
    if (count == 3 && strcmp(words[1], "server") == 0)
        return serve(atoi(words[2])), 0;
    check(count == 6, "see the head of tcp_bench.c");
    int blocks = strcmp(words[1], "asleep") == 0;
    struct test test = {blocks || strcmp(words[1], "latency") == 0, blocks,
                        strtoull(words[2], NULL, 10), strtoull(words[3], NULL, 10)};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(words[5]))};
    int peer = socket(AF_INET, SOCK_STREAM, 0);
    check(inet_pton(AF_INET, words[4], &to.sin_addr) == 1 &&
              connect(peer, (void *)&to, sizeof to) == 0,
          "connect");
    tune(peer, blocks);
    char *bytes = malloc(test.size), end;
    /* Otherwise all of it is the kernel's one page of zeros, which never leaves the caches. */
    memset(bytes, 0x5a, test.size);
    double *times = malloc(test.iterations * sizeof *times), began = now(), last = began;
    move(peer, (char *)&test, sizeof test, 1);
    for (uint64_t at = 0; at < test.iterations; at++) {
        move(peer, bytes, test.size, 1);
        if (test.answers) {
            move(peer, bytes, test.size, 0);
            double time = now();
            times[at] = (time - last) / 2, last = time;
        }
    }
    move(peer, &end, 1, 0);
    double took = now() - began;
    printf("{\"test\":\"%s\",\"size\":%llu,", test.answers ? "latency" : words[1],
           (unsigned long long)test.size);
    if (test.answers) {
        qsort(times, test.iterations, sizeof *times, by_size);
        printf("\"latency_us\":{\"p50\":%.4f,\"mean\":%.4f}}\n", times[test.iterations / 2],
               took / (double)test.iterations / 2);
    } else {
        double rate = (double)test.iterations / took;
        printf("\"bandwidth_gbps\":%.4f,\"rate_mps\":%.4f}\n", rate * (double)test.size / 1e3,
               rate);
    }
    return 0;
}
