// One billing account: its meters, postings, payments and statements, and its adjustment by an operator.
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { api, dataOf, keyed, type Schemas } from "../api/client.ts";
import { newestFirst } from "../api/queries.ts";
import { POLL_MS, pollUnreported } from "../api/query-client.ts";
import { commandAmount, minorDigits, money, moneyMicro, parseMoney } from "../format/money.ts";
import { gpuctl, readable, shortId } from "../format/text.ts";
import { Action, Guard, REASON, RoleNeeded, type ActionSpec } from "../ui/action.tsx";
import { GuardedLink } from "../ui/guarded-link.tsx";
import { Card, Head } from "../ui/layout.tsx";
import { Age, Loaded } from "../ui/loaded.tsx";
import { State } from "../ui/state.tsx";
import { PagedTable, Table } from "../ui/table.tsx";
import { Id, Plain } from "../ui/text.tsx";
import { When } from "../ui/time.tsx";
import { useAddress, usePart } from "../ui/use-address.ts";
import { holderOf } from "./accounts.tsx";
import { Balance } from "./overview.tsx";
import { paymentReviewActions } from "./payment-review-actions.ts";
import { StatementTable } from "./statements.tsx";

type Account = Schemas["BillingAccount"];

// Its changes are reported to operators alone, and others may see it.
export default function AccountPage() {
  const id = usePart("id");
  const account = useQuery({
    queryKey: ["account", id],
    queryFn: () => dataOf(api.GET("/api/v1/admin/billing/accounts/{id}", { params: { path: { id } } })),
    refetchInterval: pollUnreported(POLL_MS),
  });
  return (
    <Guard needs="see_billing">
      <Loaded query={account}>
        {({ account: data, meters }) => (
          <>
            <Head title={holderOf(data)} age={<Age query={account} ofOperators />}>
              <Action needs="adjust_billing" spec={adjust(data)} />
            </Head>
            <RoleNeeded needs="adjust_billing" to="credit or debit this account" />
            <Balance account={data} />
            <Card title="Meters">
              <Table
                label="Meters"
                rows={meters}
                keyOf={(meter) => meter.allocation_id}
                none={<p>Nothing is billed at the moment.</p>}
                columns={[
                  {
                    title: "Allocation",
                    cell: (meter) => (
                      // The allocations of others are shown to administrators alone.
                      <GuardedLink needs="rescue_allocations" to="/allocations/$id" params={{ id: meter.allocation_id }}>
                        <code title={meter.allocation_id}>{shortId(meter.allocation_id)}</code>
                      </GuardedLink>
                    ),
                  },
                  { title: "User", cell: (meter) => <Plain>{meter.user_id}</Plain> },
                  { title: "Per hour", number: true, cell: (meter) => money(meter.minor_per_hour, data.currency) },
                  { title: "Charged", number: true, cell: (meter) => micro(meter.charged_micro, data) },
                  { title: "On hold", number: true, cell: (meter) => micro(meter.held_micro, data) },
                  { title: "Billed until", cell: (meter) => <When at={meter.billed_until} /> },
                ]}
              />
            </Card>
            <Postings id={data.id} />
            <div className="columns">
              <Payments id={data.id} />
              <Statements id={data.id} />
            </div>
          </>
        )}
      </Loaded>
    </Guard>
  );
}

function micro(value: number | bigint, { currency }: Account): string {
  return currency ? moneyMicro(value, currency) : "–";
}

function adjust({ id, currency }: Account): ActionSpec<unknown> {
  const unit = currency ?? "EUR";
  return {
    id: `adjust:${id}`,
    label: "Adjust…",
    title: "Credit or debit this account",
    danger: true,
    consequences: <p>The amount is posted at once, and cannot be taken back but by another adjustment. The holder reads the reason in the ledger.</p>,
    fields: [
      {
        name: "direction",
        label: "Kind",
        kind: "select",
        required: true,
        initial: "credit",
        options: [
          { value: "credit", label: "credit: the holder gets the amount" },
          { value: "debit", label: "debit: the amount is taken" },
        ],
      },
      { name: "amount", sentAs: "amount_minor", label: `Amount in ${unit}`, required: true, maxLength: 20, help: `With ${minorDigits(unit)} decimals at most.` },
      REASON,
    ],
    command: (values) =>
      gpuctl("billing", "adjust", id, ["--amount", values["amount"] ? `${values["direction"] === "debit" ? "-" : ""}${commandAmount(values["amount"].trim(), unit)}` : null], ["--reason", values["reason"]]),
    send: async (values, key) => {
      const amount = parseMoney(values["amount"] ?? "", unit);
      if ("problem" in amount) throw new Error(amount.problem);
      const body = { amount_minor: values["direction"] === "debit" ? -amount.minor : amount.minor, currency: unit, reason: values["reason"] ?? "" };
      return dataOf(api.POST("/api/v1/admin/billing/accounts/{id}/adjustments", { params: { path: { id }, ...keyed(key) }, body }));
    },
    refreshes: ["account", "accounts", "account-ledger", "balance"],
  };
}

function Postings({ id }: { id: string }) {
  const [address, set] = useAddress();
  const page = address["page"];
  const ledger = useQuery({
    queryKey: ["account-ledger", id, page],
    queryFn: () => dataOf(api.GET("/api/v1/admin/billing/accounts/{id}/ledger", { params: { path: { id }, query: page ? { page_token: page } : {} } })),
    placeholderData: keepPreviousData,
    refetchInterval: pollUnreported(30_000),
  });
  return (
    <Card title="Postings" actions={<Age query={ledger} ofOperators />}>
      <PagedTable
        label="Postings"
        query={ledger}
        page={page}
        open={(next) => set({ page: next })}
        keyOf={(posting) => String(posting.number)}
        none={<p>Nothing is posted.</p>}
        columns={[
          { title: "No.", number: true, cell: (posting) => posting.number },
          { title: "Kind", cell: (posting) => readable(posting.kind) },
          { title: "For", cell: (posting) => (posting.allocation_id ? <Id>{posting.allocation_id}</Id> : <Plain>{posting.reason}</Plain>) },
          { title: "At", cell: (posting) => <When at={posting.at} /> },
          { title: "Change", number: true, cell: (posting) => moneyMicro(posting.change_micro, posting.currency) },
          { title: "Balance", number: true, cell: (posting) => money(posting.balance_minor, posting.currency) },
        ]}
      />
    </Card>
  );
}

/** As many payments as a page of them has. */
const PAYMENTS_OF_PAGE = 20;

function Payments({ id }: { id: string }) {
  const [address, set] = useAddress();
  const page = address["payments_page"];
  const payments = useQuery({
    queryKey: ["account-payments", id, page],
    queryFn: () => {
      const query = { limit: PAYMENTS_OF_PAGE, ...(page ? { page_token: page } : {}) };
      return newestFirst((order) => dataOf(api.GET("/api/v1/admin/billing/accounts/{id}/payments", { params: { path: { id }, query: { ...query, ...order } } })));
    },
    placeholderData: keepPreviousData,
    refetchInterval: pollUnreported(30_000),
  });
  return (
    <Card title="Payments" actions={<Age query={payments} ofOperators />}>
      {payments.data?.items.some(({ state }) => state === "under_review") && <RoleNeeded needs="settle_processor_events" to="settle or dismiss a payment under review" />}
      <PagedTable
        label="Payments"
        query={payments}
        page={page}
        open={(payments_page) => set({ payments_page }, { inPlace: true })}
        keyOf={(payment) => payment.id}
        none={page ? <p>Nothing is left on this page. Go to the first one.</p> : <p>Nothing was paid in yet.</p>}
        columns={[
          { title: "Amount", number: true, cell: (payment) => money(payment.amount_minor, payment.currency) },
          { title: "State", cell: (payment) => <State of={payment.state} /> },
          { title: "Payer", cell: (payment) => <Plain>{payment.payer}</Plain> },
          { title: "Begun", cell: (payment) => <When at={payment.created_at} /> },
          { title: "Note", cell: (payment) => <Plain>{payment.reason}</Plain> },
          { title: "Actions", cell: (payment) => <Review of={payment} /> },
        ]}
      />
    </Card>
  );
}

function Review({ of: payment }: { of: Schemas["Payment"] }) {
  return (
    <span className="row-actions">
      {paymentReviewActions(payment).map((spec) => (
        <Action key={spec.id} quiet needs="settle_processor_events" spec={spec} />
      ))}
    </span>
  );
}

function Statements({ id }: { id: string }) {
  const statements = useQuery({
    queryKey: ["account-statements", id],
    queryFn: () => dataOf(api.GET("/api/v1/admin/billing/accounts/{id}/statements", { params: { path: { id }, query: { limit: 200 } } })),
    refetchInterval: pollUnreported(60_000),
  });
  return (
    <Card title="Monthly statements" actions={<Age query={statements} ofOperators />}>
      <Loaded query={statements}>
        {({ items }) => <StatementTable rows={items} read={(month) => dataOf(api.GET("/api/v1/admin/billing/accounts/{id}/statements/{month}", { params: { path: { id, month } } }))} fileOf={(month, kind) => `/api/v1/admin/billing/accounts/${id}/statements/${month}/${kind}`} />}
      </Loaded>
    </Card>
  );
}
