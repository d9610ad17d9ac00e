// What Carrack needs of a guest's RDMA devices, tried without Carrack. A reliable connection
// between rxe0 and rxe1, both in this process, sends, writes, reads, and does both atomic
// operations. Its output is of libtest's form, so that it is counted as tests.
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LENGTH = 100000, WORD = 8, SECONDS = 20 };
// 7 retries mean "for ever" to the kernel's soft device.
enum { TIMEOUT = 14, RETRIES = 6, RECEIVER_RETRIES = 6, FIRST_PACKET = 100 };

static const int ALL_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                              IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

// Also ends the test's work in flight: its connection is never used again.
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("line %d: not so: %s\n", __LINE__, #condition);                                 \
            return 0;                                                                              \
        }                                                                                          \
    } while (0)

struct end {
    struct ibv_context *device;
    struct ibv_pd *domain;
    struct ibv_cq *completions;
    struct ibv_port_attr port;
    union ibv_gid gid;
    int gid_index;
    struct ibv_qp *pair;
    struct ibv_mr *memory;
    char *bytes;
};

static int open_end(struct end *end, const char *name)
{
    struct ibv_device **list = ibv_get_device_list(NULL);

    for (int i = 0; list && list[i]; i++)
        if (strcmp(ibv_get_device_name(list[i]), name) == 0)
            end->device = ibv_open_device(list[i]);
    CHECK(end->device);
    ibv_free_device_list(list);
    CHECK(ibv_query_port(end->device, 1, &end->port) == 0);
    CHECK(end->port.state == IBV_PORT_ACTIVE);
    // The address in which an IPv4 address stands: the one that is routed.
    for (end->gid_index = end->port.gid_tbl_len - 1; end->gid_index >= 0; end->gid_index--) {
        static const unsigned char v4[12] = {[10] = 0xff, [11] = 0xff};

        if (ibv_query_gid(end->device, 1, end->gid_index, &end->gid) == 0 &&
            memcmp(end->gid.raw, v4, 12) == 0)
            break;
    }
    CHECK(end->gid_index >= 0);
    CHECK(end->domain = ibv_alloc_pd(end->device));
    CHECK(end->completions = ibv_create_cq(end->device, 16, NULL, NULL, 0));
    CHECK(end->bytes = aligned_alloc(4096, (LENGTH + 4095) / 4096 * 4096));
    CHECK(end->memory = ibv_reg_mr(end->domain, end->bytes, LENGTH, ALL_ACCESS));
    return 1;
}

static int make_pair(struct end *end)
{
    struct ibv_qp_init_attr init = {
        .send_cq = end->completions,
        .recv_cq = end->completions,
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };

    CHECK(end->pair = ibv_create_qp(end->domain, &init));
    return 1;
}

static int connect_to(struct end *end, const struct end *peer)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL_ACCESS};

    CHECK(ibv_modify_qp(end->pair, &attr,
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
    CHECK(ibv_modify_qp(end->pair, &attr,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS,
        .sq_psn = FIRST_PACKET,
        .timeout = TIMEOUT,
        .retry_cnt = RETRIES,
        .rnr_retry = RECEIVER_RETRIES,
        .max_rd_atomic = 4,
    };
    CHECK(ibv_modify_qp(end->pair, &attr,
                        IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                            IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
    return 1;
}

static int completed(struct end *end, enum ibv_wc_opcode opcode)
{
    time_t until = time(NULL) + SECONDS;
    struct ibv_wc done;
    int count;

    while ((count = ibv_poll_cq(end->completions, 1, &done)) == 0)
        CHECK(time(NULL) < until);
    CHECK(count == 1);
    if (done.status != IBV_WC_SUCCESS)
        printf("completion: %s\n", ibv_wc_status_str(done.status));
    CHECK(done.status == IBV_WC_SUCCESS);
    CHECK(done.opcode == opcode);
    return 1;
}

static void fill(struct end *end, unsigned seed)
{
    for (int i = 0; i < LENGTH; i++)
        end->bytes[i] = (char)((seed = seed * 1103515245 + 12345) >> 16);
}

static int post(struct end *from, struct end *to, struct ibv_send_wr work, uint32_t length)
{
    struct ibv_sge list = {(uintptr_t)from->bytes, length, from->memory->lkey};
    struct ibv_send_wr *bad;

    work.sg_list = &list;
    work.num_sge = 1;
    work.send_flags = IBV_SEND_SIGNALED;
    // Atomic operations have these two where the others have theirs.
    work.wr.rdma.remote_addr = (uintptr_t)to->bytes;
    if (work.opcode == IBV_WR_RDMA_WRITE || work.opcode == IBV_WR_RDMA_READ)
        work.wr.rdma.rkey = to->memory->rkey;
    else
        work.wr.atomic.rkey = to->memory->rkey;
    CHECK(ibv_post_send(from->pair, &work, &bad) == 0);
    return 1;
}

static int sends(struct end *here, struct end *there)
{
    struct ibv_sge list = {(uintptr_t)there->bytes, LENGTH, there->memory->lkey};
    struct ibv_recv_wr receive = {.sg_list = &list, .num_sge = 1}, *bad;

    fill(here, 1);
    CHECK(ibv_post_recv(there->pair, &receive, &bad) == 0);
    CHECK(post(here, there, (struct ibv_send_wr){.opcode = IBV_WR_SEND}, LENGTH));
    CHECK(completed(here, IBV_WC_SEND) && completed(there, IBV_WC_RECV));
    CHECK(memcmp(here->bytes, there->bytes, LENGTH) == 0);
    return 1;
}

static int writes(struct end *here, struct end *there)
{
    fill(here, 2);
    CHECK(post(here, there, (struct ibv_send_wr){.opcode = IBV_WR_RDMA_WRITE}, LENGTH));
    CHECK(completed(here, IBV_WC_RDMA_WRITE));
    CHECK(memcmp(here->bytes, there->bytes, LENGTH) == 0);
    return 1;
}

static int reads(struct end *here, struct end *there)
{
    fill(there, 3);
    CHECK(post(here, there, (struct ibv_send_wr){.opcode = IBV_WR_RDMA_READ}, LENGTH));
    CHECK(completed(here, IBV_WC_RDMA_READ));
    CHECK(memcmp(here->bytes, there->bytes, LENGTH) == 0);
    return 1;
}

static int adds(struct end *here, struct end *there)
{
    volatile uint64_t *was = (uint64_t *)here->bytes, *word = (uint64_t *)there->bytes;
    struct ibv_send_wr work = {.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .wr.atomic.compare_add = 5};

    *was = 0;
    *word = 1000;
    CHECK(post(here, there, work, WORD) && completed(here, IBV_WC_FETCH_ADD));
    CHECK(*was == 1000 && *word == 1005);
    return 1;
}

static int compares_and_swaps(struct end *here, struct end *there)
{
    volatile uint64_t *was = (uint64_t *)here->bytes, *word = (uint64_t *)there->bytes;
    struct ibv_send_wr work = {.opcode = IBV_WR_ATOMIC_CMP_AND_SWP,
                               .wr.atomic = {.compare_add = 7, .swap = 77}};

    *was = 0;
    *word = 7;
    CHECK(post(here, there, work, WORD) && completed(here, IBV_WC_COMP_SWAP));
    CHECK(*was == 7 && *word == 77);
    CHECK(post(here, there, work, WORD) && completed(here, IBV_WC_COMP_SWAP));
    CHECK(*was == 77 && *word == 77);
    return 1;
}

static const struct test {
    const char *name;
    int (*body)(struct end *here, struct end *there);
} TESTS[] = {
    {"sends", sends},
    {"writes", writes},
    {"reads", reads},
    {"adds", adds},
    {"compares_and_swaps", compares_and_swaps},
};

int main(void)
{
    enum { COUNT = sizeof TESTS / sizeof *TESTS };
    struct end here = {0}, there = {0};
    int ready = open_end(&here, "rxe0") && open_end(&there, "rxe1");
    int passed = 0;

    printf("running %d tests\n", COUNT);
    for (int i = 0; i < COUNT; i++) {
        // A pair of its own for each: after a failure, the last one is in error.
        int ok = ready && make_pair(&here) && make_pair(&there) && connect_to(&here, &there) &&
                 connect_to(&there, &here) && TESTS[i].body(&here, &there);

        printf("test soft_device::%s ... %s\n", TESTS[i].name, ok ? "ok" : "FAILED");
        passed += ok;
        if (here.pair)
            ibv_destroy_qp(here.pair);
        if (there.pair)
            ibv_destroy_qp(there.pair);
        here.pair = there.pair = NULL;
    }
    printf("test result: %s. %d passed; %d failed; 0 ignored; 0 measured; 0 filtered out\n",
           passed == COUNT ? "ok" : "FAILED", passed, COUNT - passed);
    return passed == COUNT ? EXIT_SUCCESS : EXIT_FAILURE;
}
