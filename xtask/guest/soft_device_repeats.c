// Does the kernel's soft device do requests twice that it sends again? Tried without Carrack:
// connections between rxe0 and rxe1, with packets that are in flight for a while. Each writes a
// pattern, sends a number behind it, and reads the pattern back, again and again. It prints and
// counts numbers that come twice, and connections that end. It also does so where a number or a
// successful read says that the pattern is there, but other bytes are.
//
//     cargo xtask rdma-guest --program xtask/guest/soft_device_repeats.c -- [TIME-OUT [SECONDS
//     [WORDS OF NETEM...]]]
//
// The time-out is in verbs' code. 18, if nothing is said, is a second, which does not run out here.
// 14 is 67 ms, which does all the time.
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAIRS = 12, LENGTH = 100000, SHORT = 8, RECEIVES = 16, FIRST_PACKET = 100 };
// To the soft device: for ever.
enum { RETRIES = 7 };

static const int ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

// In memory that all processes share, one for each.
struct tally {
    long rounds, doubled, strange, wrong_writes, wrong_reads, ended;
};

// The rest of what a connection needs has to be there: else it is no trial.
#define NEED(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("line %d: not so: %s\n", __LINE__, #condition);                                 \
            exit(2);                                                                               \
        }                                                                                          \
    } while (0)

struct end {
    struct ibv_context *device;
    struct ibv_pd *domain;
    struct ibv_cq *sends, *receives;
    struct ibv_port_attr port;
    union ibv_gid gid;
    int gid_index;
    struct ibv_qp *pair;
    struct ibv_mr *memory;
    // What is written, what is read back, and a number for each receive.
    struct {
        unsigned char bytes[LENGTH], back[LENGTH];
        uint64_t numbers[RECEIVES];
    } * at;
};

static void open_end(struct end *end, const char *name)
{
    static const unsigned char v4[12] = {[10] = 0xff, [11] = 0xff};
    struct ibv_device **list = ibv_get_device_list(NULL);

    for (int i = 0; list && list[i]; i++)
        if (strcmp(ibv_get_device_name(list[i]), name) == 0)
            end->device = ibv_open_device(list[i]);
    NEED(end->device && ibv_query_port(end->device, 1, &end->port) == 0);
    for (end->gid_index = end->port.gid_tbl_len - 1; end->gid_index >= 0; end->gid_index--)
        if (ibv_query_gid(end->device, 1, end->gid_index, &end->gid) == 0 &&
            memcmp(end->gid.raw, v4, 12) == 0)
            break;
    NEED(end->gid_index >= 0);
    NEED(end->domain = ibv_alloc_pd(end->device));
    NEED(end->sends = ibv_create_cq(end->device, 64, NULL, NULL, 0));
    NEED(end->receives = ibv_create_cq(end->device, 64, NULL, NULL, 0));
    NEED(end->at = calloc(1, sizeof *end->at));
    NEED(end->memory = ibv_reg_mr(end->domain, end->at, sizeof *end->at, ACCESS));
    struct ibv_qp_init_attr init = {
        .send_cq = end->sends,
        .recv_cq = end->receives,
        .cap = {.max_send_wr = 16, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    NEED(end->pair = ibv_create_qp(end->domain, &init));
}

static void connect_to(struct end *end, const struct end *peer, int timeout)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS};

    NEED(ibv_modify_qp(end->pair, &attr,
                       IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR,
        .path_mtu = end->port.active_mtu,
        .dest_qp_num = peer->pair->qp_num,
        .rq_psn = FIRST_PACKET,
        .max_dest_rd_atomic = 4,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1,
                    .port_num = 1,
                    .grh = {.dgid = peer->gid, .sgid_index = end->gid_index, .hop_limit = 64}},
    };
    NEED(ibv_modify_qp(end->pair, &attr,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                           IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS,
        .sq_psn = FIRST_PACKET,
        .timeout = timeout,
        .retry_cnt = RETRIES,
        .rnr_retry = 7,
        .max_rd_atomic = 4,
    };
    NEED(ibv_modify_qp(end->pair, &attr,
                       IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                           IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

static void receive(struct end *end, int slot)
{
    struct ibv_sge list = {(uintptr_t)&end->at->numbers[slot], sizeof(uint64_t), end->memory->lkey};
    struct ibv_recv_wr work = {.wr_id = slot, .sg_list = &list, .num_sge = 1}, *bad;

    NEED(ibv_post_recv(end->pair, &work, &bad) == 0);
}

static void fill(unsigned char *bytes, uint64_t round, size_t length)
{
    uint32_t seed = (uint32_t)round * 2654435761u + 1;

    for (size_t i = 0; i < length; i++)
        bytes[i] = (seed = seed * 1103515245 + 12345) >> 16;
}

// Takes in the numbers that have come. `pattern` is what was written before the number of this
// round.
static void hear(struct end *there, uint64_t *expected, const unsigned char *pattern, size_t length,
                 struct tally *tally)
{
    struct ibv_wc come;

    while (ibv_poll_cq(there->receives, 1, &come) > 0) {
        if (come.status != IBV_WC_SUCCESS)
            return;
        uint64_t number = there->at->numbers[come.wr_id];

        if (come.byte_len != sizeof number) {
            printf("round %lu: a message of %u bytes that was not sent\n", tally->rounds,
                   come.byte_len);
            tally->strange++;
        } else if (number != *expected) {
            printf("round %lu: number %lu comes again\n", tally->rounds, (unsigned long)number);
            tally->doubled++;
        } else {
            ++*expected;
            if (memcmp(there->at->bytes, pattern, length) != 0) {
                printf("round %lu: other bytes than were written\n", tally->rounds);
                tally->wrong_writes++;
            }
        }
        receive(there, come.wr_id);
    }
}

// One connection, until the time ends or it does.
static void go(int timeout, time_t until, struct tally *tally)
{
    static unsigned char pattern[LENGTH];
    struct end here = {0}, there = {0};
    uint64_t expected = 0;

    open_end(&here, "rxe0");
    open_end(&there, "rxe1");
    connect_to(&here, &there, timeout);
    connect_to(&there, &here, timeout);
    for (int slot = 0; slot < RECEIVES; slot++)
        receive(&there, slot);
    for (uint64_t round = 0; time(NULL) < until; round++, tally->rounds++) {
        size_t length = round % 2 ? LENGTH : SHORT;
        struct ibv_sge bytes = {(uintptr_t)here.at->bytes, length, here.memory->lkey};
        struct ibv_sge number = {(uintptr_t)&here.at->numbers[0], sizeof round, here.memory->lkey};
        struct ibv_sge back = {(uintptr_t)here.at->back, length, here.memory->lkey};
        struct ibv_send_wr send = {.opcode = IBV_WR_SEND,
                                   .sg_list = &number,
                                   .num_sge = 1,
                                   .send_flags = IBV_SEND_SIGNALED};
        struct ibv_send_wr write = {
            .opcode = IBV_WR_RDMA_WRITE, .sg_list = &bytes, .num_sge = 1, .next = &send};
        struct ibv_send_wr read = {.opcode = IBV_WR_RDMA_READ,
                                   .sg_list = &back,
                                   .num_sge = 1,
                                   .send_flags = IBV_SEND_SIGNALED};
        struct ibv_send_wr *steps[] = {&write, &read}, *bad;

        fill(pattern, round, length);
        memcpy(here.at->bytes, pattern, length);
        memset(here.at->back, 0, length);
        here.at->numbers[0] = round;
        write.wr.rdma.remote_addr = read.wr.rdma.remote_addr = (uintptr_t)there.at->bytes;
        write.wr.rdma.rkey = read.wr.rdma.rkey = there.memory->rkey;
        for (int step = 0; step < 2; step++) {
            struct ibv_wc done;
            int found;

            NEED(ibv_post_send(here.pair, steps[step], &bad) == 0);
            while ((found = ibv_poll_cq(here.sends, 1, &done)) == 0)
                hear(&there, &expected, pattern, length, tally);
            NEED(found == 1);
            if (done.status != IBV_WC_SUCCESS) {
                printf("round %lu: the connection ends: %s\n", tally->rounds,
                       ibv_wc_status_str(done.status));
                tally->ended++;
                return;
            }
        }
        if (memcmp(here.at->back, pattern, length) != 0) {
            printf("round %lu: a read of %zu bytes succeeds and has brought others\n",
                   tally->rounds, length);
            tally->wrong_reads++;
        }
        // What is acknowledged has come: else the next round's bytes would be looked at for this
        // one's.
        while (expected <= round && time(NULL) < until + 10)
            hear(&there, &expected, pattern, length, tally);
    }
}

static void tc(const char *interface, const char *words)
{
    char line[500];

    snprintf(line, sizeof line, "tc qdisc replace dev %s root netem limit 100000 %s", interface,
             words);
    NEED(system(line) == 0);
}

int main(int count, char **words)
{
    int timeout = count > 1 ? atoi(words[1]) : 18;
    int seconds = count > 2 ? atoi(words[2]) : 30;
    char netem[400] = "delay 60ms";
    struct tally *tallies, all = {0};

    setvbuf(stdout, NULL, _IOLBF, 0);
    NEED(timeout > 0 && timeout < 32 && seconds > 0);
    if (count > 3)
        netem[0] = 0;
    for (int i = 3; i < count; i++)
        strncat(strncat(netem, words[i], sizeof netem - strlen(netem) - 1), " ",
                sizeof netem - strlen(netem) - 1);
    tc("v0", netem);
    tc("v1", netem);
    tallies = mmap(NULL, PAIRS * sizeof *tallies, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(tallies != MAP_FAILED);
    printf("running 1 test\n");
    for (int i = 0; i < PAIRS; i++) {
        pid_t child = fork();

        NEED(child >= 0);
        if (child == 0) {
            go(timeout, time(NULL) + seconds, &tallies[i]);
            exit(0);
        }
    }
    int status, ok = 1;

    while (wait(&status) > 0)
        ok = ok && status == 0;
    for (int i = 0; i < PAIRS; i++) {
        all.rounds += tallies[i].rounds;
        all.doubled += tallies[i].doubled;
        all.strange += tallies[i].strange;
        all.wrong_writes += tallies[i].wrong_writes;
        all.wrong_reads += tallies[i].wrong_reads;
        all.ended += tallies[i].ended;
    }
    printf("time-out %d, %s: %ld rounds of %d connections: %ld messages doubled, %ld never "
           "sent, %ld writes and %ld reads with other bytes, %ld connections ended\n",
           timeout, netem, all.rounds, PAIRS, all.doubled, all.strange, all.wrong_writes,
           all.wrong_reads, all.ended);
    ok = ok && all.rounds > PAIRS && !all.doubled && !all.strange && !all.wrong_writes &&
         !all.wrong_reads && !all.ended;
    printf("test soft_device_repeats::nothing_is_done_twice ... %s\n", ok ? "ok" : "FAILED");
    printf("test result: %s. %d passed; %d failed; 0 ignored; 0 measured; 0 filtered out\n",
           ok ? "ok" : "FAILED", ok, !ok);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
